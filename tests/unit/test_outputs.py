"""Outputs that a user names: an existing one needs --overwrite, and what is no regular file is never replaced."""

from __future__ import annotations

import os
from pathlib import Path

import hostile
import pytest
import test_timeline
from made_runs import make_run
from refusals import check_refusal
from test_world import make_world

from hvd_bert.distributed.world import CollectiveError
from hvd_bert.tools.bench import __main__ as bench_flags
from hvd_bert.tools.bench import speed, sweep
from hvd_bert.tools.bench.launching import Launching, Machine
from hvd_bert.tools.evaluate import __main__ as evaluation_flags
from hvd_bert.tools.evaluate import running as evaluation
from hvd_bert.tools.report.__main__ import main as report
from hvd_bert.tools.timeline.__main__ import main as timeline
from hvd_bert.tools.tune import __main__ as tune

PLACES = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/null"),
    "below a file": lambda path: path.parent.write_text(""),
    "in no folder": lambda path: None,
}
EXISTING = {"file": lambda path: path.write_text("mine"), "link": lambda path: path.symlink_to("nowhere")}


CASES = [*((what, ["--overwrite"]) for what in PLACES), *((what, []) for what in EXISTING)]


@pytest.mark.parametrize(("what", "flags"), CASES, ids=str)
def test_outputs_are_refused_before_the_work(tmp_path, monkeypatch, capsys, what, flags):
    for module in (speed, evaluation):
        monkeypatch.setattr(module, "set_up", lambda config, world: None)
    path = tmp_path / ("sub/out.json" if what in ("below a file", "in no folder") else "out.json")
    (PLACES | EXISTING)[what](path)
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


def state(path: Path) -> object:
    return (os.lstat(path).st_ino, os.lstat(path).st_mtime_ns) if os.path.lexists(path) else None


@pytest.mark.parametrize("name", ["out.html", "link.html"])
def test_page_of_a_timeline_is_replaced(tmp_path, name):
    path = test_timeline.training(4).write(tmp_path / "t.json")
    (tmp_path / "link.html").symlink_to("out.html")
    (tmp_path / "out.html").write_text("earlier")
    command = [str(path), "--html", str(tmp_path / name)]
    assert timeline(command) == 2 and (tmp_path / "out.html").read_text() == "earlier"
    assert timeline([*command, "--overwrite"]) == 0
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>") and (tmp_path / "link.html").is_symlink()


def test_a_report_replaces_an_earlier_one_with_overwrite(tmp_path, capsys):
    make_run(tmp_path / "run")
    out, others = tmp_path / "out", ("notes.txt", "scaling_gpu.png")
    command = [str(tmp_path / "run"), "--out", str(out)]
    assert report(command) == 0
    for name in ("report.md", "runs.csv", "scaling_1.png", *others):
        (out / name).write_text("earlier")
    for again in (lambda: report(command), lambda: sweep.main(["--report", str(out), "--out", "new"])):
        assert again() == 2
        check_refusal(capsys.readouterr().err.rstrip(), f" {out} ", "report.md, runs.csv", "--overwrite")
        assert (out / "report.md").read_text() == "earlier"
    assert report([*command, "--overwrite"]) == 0
    assert sorted(os.listdir(out)) == ["notes.txt", "report.html", "report.md", "scaling_gpu.png"]
    assert (out / "report.md").read_text() != "earlier" and {(out / name).read_text() for name in others} == {"earlier"}


@pytest.mark.parametrize("what", ["file", "fifo", "link"])
def test_a_report_refuses_what_is_no_file(tmp_path, capsys, what):
    run, out = make_run(tmp_path / "run"), tmp_path / "out"
    bad = out if what == "file" else out / "runs.csv"
    bad.parent.mkdir(exist_ok=True)
    {"file": lambda path: path.write_text(""), "link": lambda path: path.symlink_to("x"), **hostile.NO_FILES}[what](bad)
    before = state(bad)
    assert report([str(run), "--out", str(out), "--overwrite"]) == 2
    assert f"--out {out} cannot be written" in capsys.readouterr().err
    assert sweep.main(["--report", str(out), "--out", "new", "--overwrite"]) == 2
    assert f"--report {out} cannot be written" in capsys.readouterr().err
    assert state(bad) == before and (what == "file" or os.listdir(out) == ["runs.csv"])


@pytest.mark.parametrize("command", [sweep.main, tune.main])
def test_refused_folder_of_a_sweep_has_no_lock_file(tmp_path, monkeypatch, command):
    monkeypatch.setattr(Machine, "here", lambda environ: Machine(cores=2, gpus=0, allocation=None))
    monkeypatch.setattr(Launching, "obstacle", lambda *_: "")
    (tmp_path / "thesis.tex").write_text("mine")
    assert command(["--out", str(tmp_path), "--ranks", "2"]) == 2
    assert os.listdir(tmp_path) == ["thesis.tex"]
