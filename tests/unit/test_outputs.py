"""Paths given by the user: existing outputs, pipes and devices, invalid names, hostile content."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import hostile
import pytest
import test_timeline
from made_runs import make_run
from refusals import check_refusal, refused
from test_world import make_world

from hvd_bert import train
from hvd_bert.config import command_line
from hvd_bert.data.sources import files, squad
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.hub import json_file
from hvd_bert.predict.__main__ import main as predict
from hvd_bert.predict.writing import check as check_predictions
from hvd_bert.storage.reading import read_json
from hvd_bert.tools.bench import __main__ as bench_flags
from hvd_bert.tools.bench import speed, sweep
from hvd_bert.tools.doctor.__main__ import main as doctor
from hvd_bert.tools.evaluate import __main__ as evaluation_flags
from hvd_bert.tools.evaluate import running as evaluation
from hvd_bert.tools.report.__main__ import main as report
from hvd_bert.tools.runs import record
from hvd_bert.tools.runs.launching import Machine
from hvd_bert.tools.runs.out_folder import opened
from hvd_bert.tools.timeline import __main__ as timeline_module
from hvd_bert.tools.timeline.__main__ import main as timeline
from hvd_bert.tools.tune.__main__ import main as tune

OBSTACLES = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/null"),
    "below a file": lambda path: path.parent.write_text(""),
    "in no folder": lambda path: None,
}
EXISTING = {"file": lambda path: path.write_text("mine"), "link": lambda path: path.symlink_to("nowhere")}


CASES = [*((name, ["--overwrite"]) for name in OBSTACLES), *((name, []) for name in EXISTING)]


@pytest.mark.parametrize(("obstacle", "flags"), CASES, ids=str)
def test_outputs_are_refused_before_the_work(tmp_path, monkeypatch, capsys, obstacle, flags):
    monkeypatch.setattr(evaluation, "set_up", lambda config, world: None)
    path = tmp_path / ("sub/out.json" if obstacle in ("below a file", "in no folder") else "out.json")
    (OBSTACLES | EXISTING)[obstacle](path)
    before = state(path)
    words = ["--json", str(path), *flags]
    refusal = rf"--json {path} cannot be written: .*" + ("" if flags else "add --overwrite")
    with pytest.raises(CollectiveError, match=refusal):
        speed.run(*bench_flags.parse(words), make_world())
    with pytest.raises(CollectiveError, match=refusal):
        evaluation.run(*evaluation_flags.parse(["no/model", *words, "--strategy", "none"]), make_world())
    assert timeline([str(tmp_path / "no timeline"), "--html", str(path), *flags]) == 2
    error = capsys.readouterr().err
    assert f"--html {path} cannot be written: " in error and ("add --overwrite" in error) == (not flags)
    assert state(path) == before


def test_outputs_that_would_replace_an_input_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "set_up", lambda config, world: None)
    file, run = tmp_path / "in.jsonl", tmp_path / "run"
    file.write_text("mine")
    for path, replaced in ((file, file), (run / "eval_results.json", f"a file of {run}")):
        flags = ["--overwrite", "--json", str(path), "--validation_file", str(file)]
        with refused("--json", path, f"replace {replaced}", error=CollectiveError):
            evaluation.run(*evaluation_flags.parse(["no", *flags, "--output_dir", str(run)]), make_world())
    with refused("--json", file, f"replace {file}", error=CollectiveError):
        speed.run(*bench_flags.parse(["--overwrite", "--json", str(file), "--train_file", str(file)]), make_world())
    assert timeline([str(file), "--html", str(file), "--overwrite"]) == EXIT_BAD_INPUT
    assert f"--html {file}" in capsys.readouterr().err
    for path in (file, run / "metrics.jsonl"):
        flags = SimpleNamespace(model=str(run), input=str(file), output=path, overwrite=True)
        with refused("--output", path, error=CollectiveError):
            check_predictions(flags, make_world())
    assert file.read_text() == "mine" and os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("command", ["timeline", "report"])
def test_files_that_another_process_writes_meanwhile_stay(tmp_path, monkeypatch, capsys, command):
    source, out = test_timeline.training(4).write(tmp_path / "t.json"), tmp_path / "out" / "report.html"
    out.parent.mkdir()
    run, read = make_run(tmp_path / "run"), {"timeline": timeline_module.read, "report": record.read}[command]

    def meanwhile(*given: object, **more: object) -> object:
        out.write_text("another's")
        return read(*given, **more)

    monkeypatch.setattr(timeline_module if command == "timeline" else record, "read", meanwhile)
    words = [str(source), "--html", str(out)] if command == "timeline" else [str(run), "--out", str(out.parent)]
    assert {"timeline": timeline, "report": report}[command](words) == EXIT_BAD_INPUT
    assert "add --overwrite" in capsys.readouterr().err
    assert out.read_text() == "another's" and os.listdir(out.parent) == ["report.html"]


def state(path: Path) -> object:
    return (os.lstat(path).st_ino, os.lstat(path).st_mtime_ns) if os.path.lexists(path) else None


def test_a_report_replaces_an_earlier_report_with_overwrite(tmp_path, capsys):
    make_run(tmp_path / "run")
    out, others = tmp_path / "out", ("notes.txt", "scaling_gpu.png")
    command = [str(tmp_path / "run"), "--out", str(out)]
    assert report(command) == 0
    for name in ("report.md", "runs.csv", "scaling_1_memory.pdf", *others):
        (out / name).write_text("earlier")
    for again in (lambda: report(command), lambda: sweep.main(["--report", str(out), "--out", "new"])):
        assert again() == 2
        check_refusal(capsys.readouterr().err.rstrip(), f" {out} ", "report.md, runs.csv", "--overwrite")
        assert (out / "runs.csv").read_text() == "earlier"
    assert report([*command, "--overwrite"]) == 0
    assert sorted(os.listdir(out)) == ["notes.txt", "report.html", "scaling_gpu.png"]
    assert {(out / name).read_text() for name in others} == {"earlier"}


@pytest.mark.parametrize("kind", ["file", "fifo", "link"])
def test_a_report_refuses_paths_that_are_not_files(tmp_path, capsys, kind):
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    bad = out if kind == "file" else out / "runs.csv"
    bad.parent.mkdir(exist_ok=True)
    {"file": lambda path: path.write_text(""), "link": lambda path: path.symlink_to("x"), **hostile.NO_FILES}[kind](bad)
    before = state(bad)
    assert report([str(run), "--out", str(out), "--overwrite"]) == 2
    assert f"--out {out} cannot be written" in capsys.readouterr().err
    assert sweep.main(["--report", str(out), "--out", "new", "--overwrite"]) == 2
    assert f"--report {out} cannot be written" in capsys.readouterr().err
    assert state(bad) == before and (kind == "file" or os.listdir(out) == ["runs.csv"])


LONG = "n" * 300
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(report, [LONG], id="report"),
        pytest.param(report, ["run", "--out", LONG], id="report --out"),
        pytest.param(timeline, [LONG], id="timeline"),
        pytest.param(timeline, ["timeline.json", "--html", LONG], id="timeline --html"),
        pytest.param(predict, [LONG, "--context", "a", "--question", "b"], id="predict"),
        pytest.param(predict, [".", "--input", LONG], id="predict --input"),
        pytest.param(sweep.main, ["--ranks", "1", "--out", LONG], id="sweep --out"),
        pytest.param(doctor, ["--log", LONG], id="doctor --log"),
        pytest.param(doctor, ["--hostfile", LONG], id="doctor --hostfile"),
    ],
)
def test_names_that_are_too_long(command, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(make_run(tmp_path / "run").parent)
    assert command(words) == EXIT_BAD_INPUT
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert LONG in printed.err or "predict" in command.__module__


@pytest.mark.parametrize("flag", ["model_name_or_path", "config_name", "tokenizer_name", "train_file", "output_dir"])
@pytest.mark.parametrize("name", [LONG, "a\0b", "s3://b/x"], ids=["long", "NUL", "address"])
def test_impossible_names_given_to_train(flag: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"config": "sample", "max_steps": 1, "output_dir": tmp_path / "run", flag: name}
    with pytest.raises(UserError) as raised:
        train(**given)
    assert (name if "\0" not in name else "NUL") in str(raised.value)
    assert not os.listdir(tmp_path)


def test_nul_in_a_file_of_flags(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text('train_file: "a\\0b"\n')
    with refused("flags.yaml", "train_file", "NUL"):
        command_line.parse(["--config", str(tmp_path / "flags.yaml")])


@pytest.mark.parametrize("read", [read_json, lambda path: json_file(str(path.parent), path.name, None, "main")])
def test_json_that_is_nested_too_deep(read: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(ValueError, match="nested too deep"):
        read(tmp_path / "config.json")


def test_gzip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "GIB", 2**20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(bytes(2**24)))
    with refused("bomb.json.gz", "gzip"):
        squad.open_file(str(tmp_path / "bomb.json.gz"), version_2_with_negative=False).questions()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("mine"), lambda path: path.symlink_to("no")])
def test_tools_do_not_write_through_links(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "mine").write_text("mine")
    make(tmp_path / "study.log")
    with refused(tmp_path, "study.log"), opened(tmp_path / "sweep.json", {}, "sweep"):
        pytest.fail("begun")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("command", [sweep.main, tune], ids=["sweep", "tune"])
def test_out_folder_that_cannot_be_written(command, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    (tmp_path / "file").touch()
    monkeypatch.setattr(Machine, "here", lambda environ: Machine(cores=2, gpus=0, allocation=None))
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    for out, reason in (("new", "No space left"), ("file", "Not a directory")):
        assert command(["--launcher=none", "--ranks=1", f"--out={tmp_path / out}"]) == EXIT_BAD_INPUT
        message = capsys.readouterr().err.splitlines()[-1]
        check_refusal(message, f"--out {tmp_path / out} cannot be written", reason)
