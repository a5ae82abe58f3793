"""Commands replace and remove only files that this program wrote: by the folder's record, or by a mark in the file."""

from __future__ import annotations

import os
from pathlib import Path

import hostile
import pytest
import test_timeline
from made_runs import make_run
from tables import check_refusal, each
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.monitoring.recording import Recording
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.storage import written
from hvd_bert.storage.writing import check_file, replacing, write_named
from hvd_bert.tools.bench import __main__ as bench_flags
from hvd_bert.tools.bench import one_run, speed, sweep
from hvd_bert.tools.bench.launching import Launching, Machine
from hvd_bert.tools.evaluate import __main__ as evaluation_flags
from hvd_bert.tools.evaluate import running as evaluation
from hvd_bert.tools.report.__main__ import main as report
from hvd_bert.tools.timeline.__main__ import main as timeline
from hvd_bert.tools.tune import __main__ as tune
from hvd_bert.training.meter import Meter

NOT_OURS = "this program did not write"
NOT_THE_COMMANDS = "this command did not write"


def test_record(tmp_path):
    assert written.names(tmp_path) == written.names(tmp_path / "nowhere") == set()
    for name in ("a", "b", "mine"):
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError, match=rf"{NOT_OURS} \(a, b\)"):
        written.claim(tmp_path, "b", "c", "a")
    written.add(tmp_path, "a", "../mine")
    written.add(tmp_path, "a")
    written.claim(tmp_path, "a", "c")
    assert (tmp_path / written.RECORD).read_text().split() == ["../mine", "a", "c"]
    written.add(tmp_path, "..")
    written.remove(tmp_path, ["a", "b", "../mine", "..", "."])
    assert sorted(os.listdir(tmp_path)) == [written.RECORD, "b", "mine"]
    assert written.names(tmp_path) == {"../mine", "..", "c"}
    (tmp_path / written.RECORD).write_text("tb\nconfig.js")  # cut short
    written.add(tmp_path, "config.json")
    assert written.names(tmp_path) == {"tb", "config.jsconfig.json"}  # so that config.json is rather kept


def test_a_command_replaces_and_removes_only_its_own_files(tmp_path):
    for name in ("config.json", "report.md"):
        (tmp_path / name).write_text("the run's")
    written.add(tmp_path, "config.json", "report.md")
    for command, name in (("predict", "config.json"), ("report", "report.md")):
        with pytest.raises(FileExistsError):
            written.claim(tmp_path, name, command=command)
        written.remove(tmp_path, [name], command)
    for command in ("predict", "report"):
        written.claim(tmp_path, f"{command}.csv", "shared.csv", command=command)
        (tmp_path / f"{command}.csv").write_text(command)
    written.claim(tmp_path, "predict.csv", command="predict")
    written.remove(tmp_path, written.names(tmp_path) | {"predict.csv", "report.csv"})
    assert sorted(os.listdir(tmp_path)) == [written.RECORD, "predict.csv", "report.csv"]
    assert written.names(tmp_path, "predict") == {"predict.csv"}  # the last command that wrote a file has it
    assert written.names(tmp_path, "report") == {"report.csv", "shared.csv"}


@each("what", ["folder", "fifo", "below a file", "in no folder"])
def test_outputs_that_cannot_be_written_are_refused_before_the_work(tmp_path, monkeypatch, capsys, what):
    for module in (speed, evaluation):
        monkeypatch.setattr(module, "set_up", lambda config, world: None)
    path, run = tmp_path / "out.json", make_run(tmp_path / "run")
    if what == "below a file":
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "out.json"
    elif what == "in no folder":
        path = tmp_path / "no" / "out.json"
    else:
        hostile.ALL[what](path)
    before = os.lstat(path).st_ino if os.path.lexists(path) else None
    with pytest.raises(CollectiveError, match=r"--json .* cannot be written"):
        speed.run(*bench_flags.parse(["--json", str(path)]), make_world())
    with pytest.raises(CollectiveError, match=r"--json .* cannot be written"):
        evaluation.run(*evaluation_flags.parse(["no/model", "--json", str(path), "--strategy", "none"]), make_world())
    assert timeline([str(tmp_path / "no timeline"), "--html", str(path)]) == 2
    assert f"--html {path} cannot be written" in capsys.readouterr().err
    if what not in ("folder", "in no folder"):
        assert report([str(run), "--out", str(path)]) == sweep.main(["--report", str(path), "--out", "new"]) == 2
        error = capsys.readouterr().err
        assert f"--out {path} cannot be written" in error and f"--report {path} cannot be written" in error
    assert (os.lstat(path).st_ino if os.path.lexists(path) else None) == before


def test_named_outputs(tmp_path):
    (tmp_path / "link.json").symlink_to("target.json")
    for name in ("out.json", "link.json"):
        for _ in range(2):
            write_named(check_file(tmp_path / name, "mine"), "mine")
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "target.json").read_text() == "mine"


def test_links_under_fixed_names_are_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (".x.json.hvd_bert.partial", "metrics.jsonl", "linked"):
        (tmp_path / name).symlink_to(precious)
    with replacing(tmp_path / "x.json") as partial:
        partial.write_text("{}")
    with pytest.raises(OSError, match="symbolic link"):
        MetricsLogger(tmp_path, enabled=True)
    with replacing(tmp_path / "linked") as partial:
        partial.write_text("new")
    assert precious.read_text() == "mine" and (tmp_path / "linked").read_text() == "new"
    other = tmp_path / "other"
    other.mkdir()
    (other / written.RECORD).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        written.add(other, "x")
    assert precious.read_text() == "mine"


def test_report_replaces_only_a_report(tmp_path, capsys):
    make_run(tmp_path / "run")
    out = tmp_path / "out"
    out.mkdir()
    command = [str(tmp_path / "run"), "--out", str(out)]
    for name in ("report.html", "report.md", "notes.txt"):
        (out / name).write_text("mine")
    assert report(command) == 2
    assert f"{NOT_THE_COMMANDS} (report.html, report.md)" in capsys.readouterr().err
    assert {path.read_text() for path in out.iterdir()} == {"mine"}
    for name in ("report.html", "report.md"):
        (out / name).unlink()
    assert report(command) == report(command) == 0
    assert (out / "notes.txt").read_text() == "mine"  # not in the way


def test_page_of_a_timeline_replaces_only_such_a_page(tmp_path, capsys):
    path = test_timeline.training(4).write(tmp_path / "t.json")
    thesis, page = tmp_path / "thesis.html", tmp_path / "t.html"
    thesis.write_text("<html>mine</html>")
    for other in (path, thesis):
        before = other.read_bytes()
        assert timeline([str(path), "--html", str(other)]) == 2
        check_refusal(capsys.readouterr().err.rstrip(), f"--html {other}", NOT_THE_COMMANDS)
        assert other.read_bytes() == before
    page.write_text("")  # nothing is lost
    assert timeline([str(path), "--html", str(page)]) == timeline([str(path), "--html", str(page)]) == 0


def recording(file: Path) -> Recording:
    world, config = make_world(size=2), parse(["--timeline_file", str(file), "--timeline_steps", "1:2"])
    world.allgather = lambda value: [value, value]  # type: ignore[method-assign]
    world.start_timeline = lambda path: path.write_text("[events")  # type: ignore[method-assign]
    return Recording(config.profiling, config.train, 3, Meter(make_world()), world)


def test_timeline_replaces_only_a_timeline(tmp_path):
    mine, pipe = tmp_path / "train.json", tmp_path / "pipe"
    mine.write_text("mine")
    os.mkfifo(pipe)
    for file in (mine, pipe, mine / "t.json"):
        with pytest.raises(CollectiveError, match=f"{file} cannot be written: "):
            recording(file)
    new = tmp_path / "new" / "t.json"
    first = recording(new)
    assert sorted(os.listdir(tmp_path)) == ["pipe", "train.json"]  # a check creates nothing
    first.before(1)
    assert new.exists()
    recording(new)
    assert mine.read_text() == "mine"


def test_benchmark_replaces_only_a_benchmarks_figures(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "bert"}')
    monkeypatch.setattr(speed, "set_up", lambda config, world: None)
    with pytest.raises(CollectiveError, match=rf"--json {path} cannot be written: .* {NOT_THE_COMMANDS} it"):
        speed.run(*bench_flags.parse(["--json", str(path)]), make_world())
    assert path.read_text() == '{"model_type": "bert"}'


def test_run_of_a_sweep_removes_only_a_runs_files(tmp_path, monkeypatch):
    folder = tmp_path / "none-1-strong-1"
    folder.mkdir()
    for name in ("notes.txt", "model.safetensors"):
        (folder / name).write_text("mine")
    written.add(folder, "train_results.json")
    (folder / "train_results.json").write_text("of an interrupted run")
    started = []

    def start(command: object, environ: dict[str, str], *_: object) -> int:
        assert environ == {"HVD_BERT_IN_SWEEP": "1"}  # else ranks warn that the Slurm job has more tasks
        started.append(set(os.listdir(folder)))
        return 1

    monkeypatch.setattr(one_run, "start_and_wait", start)
    monkeypatch.setattr(one_run, "failure_in", lambda path: "refused")
    for _ in range(2):
        assert one_run.train(["true"], {}, folder, 1.0).run is None
    assert started == [{".lock", written.RECORD, "log.txt", "notes.txt", "model.safetensors"}] * 2


@each("command", [sweep.main, tune.main])
def test_refused_folder_of_a_sweep_has_no_lock_file(tmp_path, monkeypatch, command):
    monkeypatch.setattr(Machine, "here", lambda environ: Machine(cores=2, gpus=0, allocation=None))
    monkeypatch.setattr(Launching, "obstacle", lambda *_: "")
    (tmp_path / "thesis.tex").write_text("mine")
    assert command(["--out", str(tmp_path), "--ranks", "2"]) == 2
    assert os.listdir(tmp_path) == ["thesis.tex"]
