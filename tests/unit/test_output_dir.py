"""The output folder: when it is refused, which files are replaced, and that a refused run leaves none behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import each, refused
from test_world import make_world

from hvd_bert.checkpoint import files, resume
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import Config
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import UserError
from hvd_bert.output import card, output_dir
from hvd_bert.output.run_folder import RUN_FILES
from hvd_bert.storage import written
from hvd_bert.training import start

OVERWRITE = "--overwrite_output_dir"


@pytest.fixture(autouse=True)
def no_lock_outlives_a_test() -> Iterator[None]:
    yield
    output_dir.unlock()


def config(folder: Path | None, *flags: str) -> Config:
    return parse([*([] if folder is None else ["--output_dir", str(folder)]), *flags])


def check(settings: Config) -> None:
    output_dir.check(settings.as_flat())


def begin(settings: Config, resume_point: resume.ResumePoint | None = None) -> None:
    output_dir.begin(settings.train, settings.as_flat(), resume_point, make_world())


def test_folder_is_made_with_the_settings(tmp_path):
    wanted = config(tmp_path / "a" / "b")
    check(wanted)
    assert list(tmp_path.iterdir()) == []
    begin(wanted)
    assert parse(["--config", str(tmp_path / "a" / "b" / "train_config.yaml")]) == wanted


def test_dated_folders_are_never_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output_dir.time, "strftime", lambda pattern: "runs/now")
    runs = [config(None) for _ in range(3)]
    for run in runs:
        check(run)
        begin(run)
    assert [run.train.output_dir for run in runs] == ["runs/now", "runs/now-2", "runs/now-3"]


def test_folder_with_files_is_refused_and_left_alone(tmp_path):
    for name in ("d", "a", "c", "b"):
        (tmp_path / name).write_text(name)
    with refused("(a, b, c, ...)", OVERWRITE):
        check(config(tmp_path))
    check(config(tmp_path, OVERWRITE))
    check(config(tmp_path, "--no_do_train"))  # an evaluation adds to a folder
    assert sorted(path.name for path in tmp_path.iterdir()) == [output_dir.LOCK, "a", "b", "c", "d"]


@each("place", ["file", "file/below", "link to nowhere", "link to nowhere/below"])
def test_something_else_in_the_way(tmp_path, place):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link to nowhere").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"--output_dir .*{place}"):
        check(config(tmp_path / place, OVERWRITE))


@each(
    ("flag", "name"),
    [
        ("--model_name_or_path", ""),  # training starts from it
        ("--train_file", "eval_predictions.json"),
        ("--tokenizer_name", "checkpoint-5"),
    ],
)
def test_inputs_among_the_runs_files_are_refused(tmp_path, flag, name):
    if name:
        make_run(tmp_path, name)
    with refused(flag, tmp_path / name):
        check(config(tmp_path, OVERWRITE, flag, str(tmp_path / name)))
    check(config(tmp_path, "--no_do_train", "--model_name_or_path", str(tmp_path)))


def make_run(folder: Path, *names: str) -> None:
    """The files of an earlier run."""
    folder.mkdir(exist_ok=True)
    written.add(folder, *names)
    for name in names:
        if name == "tb" or name.startswith("checkpoint-"):
            (folder / name).mkdir()
            (folder / name / "inside").write_text("a run's")
        else:
            (folder / name).write_text("a run's")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {output_dir.LOCK, written.RECORD}


EVERY = [name for name in RUN_FILES if "*" not in name and name != card.NAME] + ["checkpoint-5", "checkpoint-7.aside"]


def test_only_files_that_a_run_wrote_are_removed(tmp_path):
    mine = ["notes.txt", "checkpoint", "train-v1.1.json", "eval_mine.json", "config.json.partial", ".partial-x"]
    make_run(tmp_path, *EVERY)
    for name in mine:
        (tmp_path / name).write_text("mine")
    wanted = config(tmp_path, OVERWRITE)
    check(wanted)
    assert names(tmp_path) == {*EVERY, *mine}
    begin(wanted)
    assert names(tmp_path) == {"train_config.yaml", *mine}
    assert written.names(tmp_path) == {"train_config.yaml"}


@each("name", EVERY)
def test_folder_with_a_users_file_of_a_runs_name_is_refused(tmp_path, name):
    make_run(tmp_path, *(other for other in EVERY if other != name))
    (tmp_path / name).write_text("mine")
    before = names(tmp_path)
    for flags in ([OVERWRITE], ["--resume_from_checkpoint", "latest"]):
        with refused(f"--output_dir {tmp_path}", f"({name})"):
            check(config(tmp_path, *flags))
    assert names(tmp_path) == before and (tmp_path / name).read_text() == "mine"
    assert not (tmp_path / output_dir.LOCK).exists()  # nothing is left behind


def test_every_file_in_the_way_is_listed(tmp_path):
    """A link, too, whose target stays, and another program's settings, which make no unfinished run."""
    (tmp_path / "precious").write_text("mine")
    out = tmp_path / "out"
    make_run(out, "metrics.jsonl")
    (out / "metrics.jsonl").unlink()
    (out / "metrics.jsonl").symlink_to(tmp_path / "precious")
    (out / "train_config.yaml").write_text("mine: true")
    (out / "checkpoint-500").mkdir()
    assert not resume.unfinished(out)
    for flags in ([], [OVERWRITE]):
        with refused("(checkpoint-500, metrics.jsonl, train_config.yaml)"):
            check(config(out, *flags))
    with refused("(metrics.jsonl)"):
        check(config(out, "--no_do_train"))
    assert (tmp_path / "precious").read_text() == "mine"
    written.add(out, "train_config.yaml")
    assert resume.unfinished(out)


def test_copied_run_resumes_with_the_file_that_the_refusal_names(tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    make_run(run, "train_config.yaml", "checkpoint-5", "latest", "metrics.jsonl")
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".*"))  # as `cp -r run/* copy`
    for flags in ([], [OVERWRITE], ["--resume_from_checkpoint", "latest"]):
        with refused(written.RECORD) as refusal:
            check(config(copy, *flags))
        assert OVERWRITE not in str(refusal.value)
    shutil.copy(run / written.RECORD, copy)
    check(config(copy))
    assert resume.unfinished(copy)


def test_evaluation_replaces_only_an_evaluations_files(tmp_path):
    make_run(tmp_path, "eval_results.json", "metrics.jsonl")
    for name in ("config.json", "eval_mine.json"):
        (tmp_path / name).write_text("mine")
    check(config(tmp_path, "--no_do_train"))
    begin(config(tmp_path, "--no_do_train"))
    mine = {"config.json", "eval_mine.json"}
    assert names(tmp_path) == {"eval_results.json", "metrics.jsonl", "eval_config.yaml", *mine}
    (tmp_path / "eval_predictions.json").write_text("run_qa's")
    with refused("(eval_predictions.json)"):
        check(config(tmp_path, "--no_do_train"))


@each("meanwhile", ["train_results.json", "latest"])
def test_folder_that_was_filled_since_the_check_is_refused(tmp_path, meanwhile):
    wanted = config(tmp_path / "out", OVERWRITE)
    check(wanted)
    make_run(tmp_path / "out", "train_config.yaml", meanwhile)
    with refused(tmp_path / "out", error=CollectiveError):
        begin(wanted)
    assert names(tmp_path / "out") == {"train_config.yaml", meanwhile}
    output_dir.unlock()


@each(("began", "saved"), [(False, False), (True, True), (True, False)])
def test_next_elastic_world_resumes_only_what_an_earlier_one_began(tmp_path, began, saved):
    wanted = config(tmp_path / "out", OVERWRITE, "--save_steps", "2")
    make_run(tmp_path / "out", "checkpoint-5")
    if began:
        check(wanted)
        begin(wanted)
    if saved:
        (tmp_path / "out" / "checkpoint-2").mkdir()
    world = make_world()
    world.elastic, world.generation = True, 1
    start.check_elastic(wanted, world, None)
    assert wanted.train.overwrite_output_dir is not began
    assert wanted.checkpoint.resume_from_checkpoint == ("latest" if saved else None)


def test_rank_0_of_a_next_elastic_world_replaces_another_runs_folder(tmp_path):
    """It was on a host without rank 0, whose folder of that name is another run's."""
    wanted, world = config(tmp_path, OVERWRITE), make_world(1, 2)
    make_run(tmp_path, "train_results.json", "checkpoint-2")
    world.allgather = lambda mine: [(None, []) if isinstance(mine, tuple) else str(tmp_path), mine]  # type: ignore
    output_dir.begin(wanted.train, wanted.as_flat(), None, world)
    world = make_world()
    world.elastic, world.generation = True, 1
    kept = resume.ResumePoint(tmp_path / "checkpoint-3", files.Contents({}, {"step": 3}), 0)
    start.check_elastic(wanted, world, kept)
    check(wanted)
    begin(wanted, kept)
    assert names(tmp_path) == {"train_config.yaml"}


def test_killed_run_that_wrote_nothing_yet_is_no_obstacle(tmp_path):
    """The lock, the record, and the half of train_config.yaml."""
    begin(config(tmp_path))
    output_dir.unlock()
    shutil.move(tmp_path / "train_config.yaml", tmp_path / ".train_config.yaml.hvd_bert.partial")
    check(config(tmp_path))
