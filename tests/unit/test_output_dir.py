"""The output folder: which folders a run refuses, and which files it replaces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from refusals import refused
from test_world import make_world

from hvd_bert.checkpoint import files, resume
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import Config, from_values
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.monitoring.recording import Recording
from hvd_bert.output import output_dir
from hvd_bert.output.run_folder import RUN_FILES
from hvd_bert.storage import writing
from hvd_bert.training import start
from hvd_bert.training.meter import Meter

OVERWRITE = "--overwrite_output_dir"
HELD: output_dir.Locks = {}  # locks held by this process


@pytest.fixture(autouse=True)
def no_lock_outlives_a_test() -> Iterator[None]:
    yield
    HELD.clear()


def config(folder: Path | None, *flags: str) -> Config:
    return parse([*([] if folder is None else ["--output_dir", str(folder)]), *flags])


def check(settings: Config) -> None:
    output_dir.check(settings.as_flat(), HELD)


def begin(settings: Config, resume_point: resume.ResumePoint | None = None) -> Path:
    world = make_world()
    world.process.locks = HELD
    return output_dir.acquire(settings.as_flat(), resume_point, world)


def test_folder_is_made_with_the_settings(tmp_path):
    folder = tmp_path / "a" / "ünter: way"
    wanted = config(folder, "--null_score_diff_threshold=-1e-5", "--no_do_eval", "--eval_strategy=no")
    check(wanted)
    assert list(tmp_path.iterdir()) == []
    begin(wanted)
    assert parse(["--config", str(folder / "train_config.yaml")]) == wanted


def test_dated_folders_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output_dir.time, "strftime", lambda pattern: "runs/now")
    check(config(None))
    assert [str(begin(config(None))) for _ in range(3)] == ["runs/now", "runs/now-2", "runs/now-3"]


RESUMES, EVALUATES = ["--resume_from_checkpoint", "latest"], ["--no_do_train"]
EMPTY = ["slurm-7.out", "run.log", ".train_config.yaml.hvd_bert.partial"]  # written by a scheduler or by a killed run
FINISHED = ["train_config.yaml", "train_results.json"]


@pytest.mark.parametrize(
    ("files", "flags", "named"),
    [
        (EMPTY, [], ""),
        (EMPTY, EVALUATES, ""),
        (["train_config.yaml"], [], ""),  # an unfinished run
        (FINISHED, [], "(train_config.yaml, train_results.json)"),
        ([*FINISHED, "config.json"], [], "--model_name_or_path"),
        *((FINISHED, flags, "") for flags in ([OVERWRITE], RESUMES, EVALUATES)),
        (["eval_config.yaml"], [], "(eval_config.yaml)"),
        *((["a", "b", "config.json", "d"], flags, "(a, b, config.json, ...)") for flags in ([], RESUMES, EVALUATES)),
    ],
)
def test_folders_with_other_content_are_refused(tmp_path, files, flags, named):
    make_run(tmp_path, *files)
    with refused(f"--output_dir {tmp_path}", named) if named else nullcontext():
        check(config(tmp_path, *flags))
    assert names(tmp_path) == {*files}
    assert (tmp_path / ".lock").exists() == any("config.yaml" in name for name in files if name[0] != ".")


@pytest.mark.parametrize("path", ["file", "file/below", "link to nowhere"])
def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link to nowhere").symlink_to(tmp_path / "nowhere")
    with refused("--output_dir", path):
        check(config(tmp_path / path, OVERWRITE))


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--model_name_or_path", ""),  # the folder itself is the model
        ("--train_file", "eval_predictions.json"),
    ],
)
def test_inputs_among_the_runs_files_are_refused(tmp_path, flag, name):
    make_run(tmp_path, *filter(None, ["train_config.yaml", name]))
    with refused(flag, tmp_path / name):
        check(config(tmp_path, OVERWRITE, flag, str(tmp_path / name)))
    check(config(tmp_path, "--no_do_train", "--model_name_or_path", str(tmp_path)))


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "checkpoint-5/t.json", "", "../train.json"])
def test_timeline_that_would_replace_another_file_is_refused(tmp_path, name):
    out, file = tmp_path / "out", tmp_path / "train.json"
    flags = ["--train_file", str(file), OVERWRITE, "--timeline_file"]
    replaced = file if file.name in name else f"a file of {out}" if name else out
    with refused(f"--timeline_file {out / name}", f"replace {replaced}"):
        check(config(out, *flags, str(out / name)))
    check(config(out, *flags, str(out / "timeline.json")))


@pytest.mark.parametrize(("content", "reason"), [(None, "irectory"), (b"a\xff", "UTF-8"), (b"seed: 1\n", "run wrote")])
def test_settings_that_no_run_wrote_are_named(tmp_path, content, reason):
    file = tmp_path / "train_config.yaml"  # written by another trainer
    file.mkdir() if content is None else file.write_bytes(content)
    with refused(f"--output_dir {tmp_path}", "(train_config.yaml: ", reason, "eval_config.yaml: No such"):
        check(config(tmp_path, OVERWRITE))
    assert os.listdir(tmp_path) == ["train_config.yaml"]  # the check creates no lock file


def make_run(folder: Path, *names: str) -> None:
    """Make `folder` with the named files and folders, as an earlier run writes them."""
    folder.mkdir(exist_ok=True)
    for name in names:
        if name == "tb" or name.startswith("checkpoint-"):
            (folder / name).mkdir()
            (folder / name / "inside").write_text("a run's")
        else:
            (folder / name).write_text("a run's\nresume_from_checkpoint: null\n")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {output_dir.LOCK}


EVERY = [name for name in RUN_FILES if "*" not in name] + ["checkpoint-5", "checkpoint-7.aside"]


def test_only_a_runs_files_are_removed(tmp_path):
    leftovers = [".partial-checkpoint-8", ".replaced-checkpoint-5"]
    mine = ["notes.txt", "slurm-7.out", "checkpoint", "checkpoint-5-copy", "eval_mine.json", ".partial-x"]
    make_run(tmp_path, "train_config.yaml", "README.md")
    check(config(tmp_path))  # the run stopped before its first checkpoint
    begin(config(tmp_path))
    assert names(tmp_path) == {"train_config.yaml", "README.md"}
    HELD.clear()
    make_run(tmp_path, *EVERY, *leftovers)
    for name in mine:
        (tmp_path / name).write_text("mine")
    wanted = config(tmp_path, OVERWRITE)
    check(wanted)
    assert names(tmp_path) == {*EVERY, *leftovers, *mine}
    begin(wanted)
    assert names(tmp_path) == {"train_config.yaml", *mine}


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("../precious"), os.mkfifo], ids=["link", "pipe"])
@pytest.mark.parametrize("name", ["train_config.yaml", "metrics.jsonl", "tb", "checkpoint-7.aside"])
def test_links_and_pipes_named_like_a_runs_files_are_refused(tmp_path, name, make):
    (tmp_path / "precious").write_text("mine")
    out = tmp_path / "out"
    make_run(out, *(other for other in EVERY if other != name))
    make(out / name)
    before = names(out)
    for flags in ([OVERWRITE], ["--resume_from_checkpoint", "latest"]):
        with refused(f"--output_dir {out}", f"({name})"):
            check(config(out, *flags))
    if name in ("metrics.jsonl", "tb"):
        with refused(f"({name})"):
            check(config(out, "--no_do_train"))
    assert names(out) == before and (tmp_path / "precious").read_text() == "mine"


def test_evaluation_replaces_only_an_evaluations_files(tmp_path):
    run = {"train_config.yaml", "config.json", "eval_results.json", "metrics.jsonl"}
    make_run(tmp_path, *run)
    check(config(tmp_path, "--no_do_train"))
    begin(config(tmp_path, "--no_do_train"))
    assert names(tmp_path) == {"eval_config.yaml", *run}


def test_evaluation_is_replaced_also_after_a_kill(tmp_path, monkeypatch):
    make_run(tmp_path, "eval_config.yaml", "eval_results.json", "notes.txt")
    wanted = config(tmp_path, OVERWRITE)
    check(wanted)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):  # ends before it writes settings
        patched.setattr(output_dir, "_save_settings", lambda *_: 1 / 0)
        begin(wanted)
    HELD.clear()
    check(wanted)
    begin(wanted)
    assert names(tmp_path) == {"train_config.yaml", "notes.txt"}


@pytest.mark.parametrize("meanwhile", ["train_results.json", "latest"])
def test_folder_that_was_filled_since_the_check_is_refused(tmp_path, meanwhile):
    wanted = config(tmp_path / "out", OVERWRITE)
    check(wanted)
    make_run(tmp_path / "out", "train_config.yaml", meanwhile)
    with refused(tmp_path / "out", error=CollectiveError):
        begin(wanted)
    assert names(tmp_path / "out") == {"train_config.yaml", meanwhile}


@pytest.mark.parametrize(("began", "saved"), [(False, False), (True, True), (True, False)])
def test_next_elastic_world_resumes_only_what_an_earlier_one_began(tmp_path, began, saved):
    wanted = config(tmp_path / "out", OVERWRITE, "--save_steps", "2")
    make_run(tmp_path / "out", "train_config.yaml", "checkpoint-5")
    if began:
        check(wanted)
        begin(wanted)
    if saved:
        (tmp_path / "out" / "checkpoint-2").mkdir()
    world = make_world()
    world.elastic, world.process.generation = True, 1
    folder = {"output_dir": str(tmp_path / "out"), "overwrite_output_dir": False} if began else {}
    latest = {"resume_from_checkpoint": "latest"} if saved else {}
    assert start.decide_folder(wanted, None, world) == folder | latest


def test_rank_0_of_a_next_elastic_world_replaces_another_runs_folder(tmp_path):
    """Rank 0 moves to another host, where the output folder contains a different run."""
    wanted, world = config(tmp_path, OVERWRITE), make_world(1, 2)
    make_run(tmp_path, "train_config.yaml", "train_results.json", "checkpoint-2")
    world.allgather = lambda mine: [(None, []) if isinstance(mine, tuple) else str(tmp_path), mine]  # type: ignore
    output_dir.acquire(wanted.as_flat(), None, world)
    world = make_world()
    world.elastic, world.process.generation = True, 1
    in_memory = resume.ResumePoint(tmp_path / "checkpoint-3", files.Contents({}, {"step": 3}), 0)
    wanted = from_values(wanted.as_flat() | start.decide_folder(wanted, in_memory, world))
    check(wanted)
    begin(wanted, in_memory)
    assert names(tmp_path) == {"train_config.yaml"}


def test_links_under_fixed_names_are_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in (".x.json.hvd_bert.partial", "metrics.jsonl", "linked"):
        (tmp_path / name).symlink_to(precious)
    with writing.replacing(tmp_path / "x.json") as partial:
        partial.write_text("{}")
    with pytest.raises(OSError, match="symbolic link"):
        writing.JsonLines(tmp_path / "metrics.jsonl")
    with writing.replacing(tmp_path / "linked") as partial:
        partial.write_text("new")
    assert precious.read_text() == "mine" and (tmp_path / "linked").read_text() == "new"


def recording(file: Path, replaces: bool = False) -> Recording:
    world, wanted = make_world(size=2), parse(["--timeline_file", str(file), "--timeline_steps", "1:2"])
    world.allgather = lambda value: [value, value]  # type: ignore[method-assign]
    world.start_timeline = lambda path: path.write_text("[events")  # type: ignore[method-assign]
    return Recording(wanted.profiling, 3, Meter(make_world()), world, replaces)


def test_timeline_replaces_only_an_earlier_timeline_of_the_run(tmp_path):
    file, pipe, link = (tmp_path / name for name in ("t.json", "pipe", "link"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    recording(file)
    assert not file.exists()  # a check creates no file
    file.write_text("mine")
    wrong = [(file, False), (pipe, True), (link, True), (tmp_path, True), (file / "t.json", True)]
    wrong += [(Path("/proc/none/t.json"), True), (Path("/proc/version"), True)]  # even root cannot write there
    for path, replaces in wrong:
        with pytest.raises(CollectiveError, match=f"{path} cannot be written: "):
            recording(path, replaces)
    recording(file, replaces=True).before(1)
    assert file.read_text() == "[events"
