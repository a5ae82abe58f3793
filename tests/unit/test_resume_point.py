"""Which checkpoint a run resumes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_hostile_checkpoints as checkpoints

from hvd_bert.checkpoint import resume
from hvd_bert.config.command_line import parse
from hvd_bert.errors import UserError
from hvd_bert.storage import written


def unfinished_run(folder: Path, *steps: int) -> Path:
    """A run with checkpoints of these steps."""
    folder.mkdir()
    written.add(folder, "train_config.yaml")
    (folder / "train_config.yaml").touch()
    for step in steps:
        checkpoints.write(folder, step)
    return folder


def found(*flags: object, task=None) -> Path | None:
    point = resume.find(parse([str(flag) for flag in flags]), task)
    return point.folder if point else None


LATEST = ("--resume_from_checkpoint", "latest")


def test_an_unfinished_run_resumes_from_its_newest_checkpoint(tmp_path, monkeypatch):
    run = unfinished_run(tmp_path / "run", 10, 20)
    own = ("--output_dir", run)
    assert found(*own) == run / "checkpoint-20"
    assert found(*own, "--no_do_train") is None
    assert found(*own, "--overwrite_output_dir") is None
    assert found(*own, "--overwrite_output_dir", *LATEST) == run / "checkpoint-20"
    monkeypatch.chdir(run)
    assert found() is None
    (run / "train_results.json").touch()
    assert found(*own) is None
    assert found(*own, *LATEST) == run / "checkpoint-20"


def test_a_named_checkpoint_starts_a_run_that_then_resumes_from_its_own(tmp_path):
    named = unfinished_run(tmp_path / "other", 10, 20) / "checkpoint-10"
    run = unfinished_run(tmp_path / "run")
    again = ("--resume_from_checkpoint", named, "--output_dir", run)
    assert found(*again) == named  # stopped before its first checkpoint
    checkpoints.write(run, 10)
    assert found(*again) == run / "checkpoint-10"
    checkpoints.write(run, 15)
    assert found(*again) == run / "checkpoint-15"
    checkpoints.write(run, 20, of=checkpoints.tensors() | {"model": {}})  # of no use to this model
    assert found(*again, task=checkpoints.TASK) == run / "checkpoint-15"
    assert found(*again, "--overwrite_output_dir") == named
    (tmp_path / "link").symlink_to(run)
    own = run / "checkpoint-10"
    assert found("--resume_from_checkpoint", own, "--output_dir", tmp_path / "link") == own


@pytest.mark.parametrize("state", [None, {"step": "abc"}], ids=["behind", "damaged"])
def test_a_run_that_is_not_ahead_of_the_named_checkpoint_is_kept(tmp_path, state):
    named = unfinished_run(tmp_path / "other", 20) / "checkpoint-20"
    checkpoints.write(unfinished_run(tmp_path / "run"), 19, state)
    with pytest.raises(UserError) as refused:
        found("--resume_from_checkpoint", named, "--output_dir", tmp_path / "run")
    assert str(refused.value) == (
        f"--output_dir {tmp_path / 'run'} holds an unfinished run that is not ahead of {named}: use another folder, or"
        " add --overwrite_output_dir to replace it."
    )


def test_checkpoints_that_cannot_be_used_are_named(tmp_path, caplog):
    run = unfinished_run(tmp_path / "run", 10)
    only_model = checkpoints.write(run, 20, {"step": 20, "model_only": True})
    broken = checkpoints.write(run, 30, {"step": "abc"})
    problems = [
        f"{broken / 'state.json'} does not hold a training's state (step is 'abc', not a whole number from 0 to 2**53)",
        f"{only_model} holds only the model (--save_only_model) and cannot be resumed",
    ]
    assert found("--output_dir", run) == run / "checkpoint-10"
    assert [record.getMessage() for record in caplog.records] == [
        f"Skipping a damaged checkpoint: {problem}." for problem in problems
    ]
    other_model = checkpoints.write(run, 10, of=checkpoints.tensors() | {"model": {}})
    problems.append(f"{other_model}: model.safetensors has other tensors than the model (bias)")
    with pytest.raises(UserError) as refused:
        found("--output_dir", run, task=checkpoints.TASK)
    assert str(refused.value) == (
        f"None of the checkpoints in {run} can be used: {'; '.join(problems)}. Nothing was changed. To replace them and"
        " train from the start, add --overwrite_output_dir."
    )
    with pytest.raises(UserError) as refused:
        found("--resume_from_checkpoint", broken)
    assert str(refused.value) == f"--resume_from_checkpoint {broken} cannot be used: {problems[0]}."
    with pytest.raises(UserError) as refused:
        found("--resume_from_checkpoint", other_model, task=checkpoints.TASK)
    assert str(refused.value) == f"--resume_from_checkpoint {other_model} cannot be used: {problems[-1]}."


def test_a_lost_checkpoint_is_no_start_from_the_first_step(tmp_path, caplog):
    run = unfinished_run(tmp_path / "run", 10)
    for content in (b"checkpoint-10\n", b"\xff", b"notes"):
        (run / "latest").write_bytes(content)
        assert found("--output_dir", run) == run / "checkpoint-10"
    assert not caplog.records
    (run / "latest").write_text("checkpoint-20\n")
    assert found("--output_dir", run) == run / "checkpoint-10"
    lost = f"{run / 'latest'} names checkpoint-20, which is missing: restore it"
    assert [record.getMessage() for record in caplog.records] == [f"Skipping a damaged checkpoint: {lost}."]
    (run / "checkpoint-10").rename(run / "elsewhere")
    with pytest.raises(UserError) as refused:
        found("--output_dir", run)
    assert str(refused.value) == (
        f"None of the checkpoints in {run} can be used: {lost}. Nothing was changed. To replace them and train from the"
        " start, add --overwrite_output_dir."
    )
    assert found("--output_dir", run, "--overwrite_output_dir") is None


def test_latest_needs_a_folder_with_a_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    for flags, message in {
        (): "--resume_from_checkpoint latest: give the run's folder as well (--output_dir).",
        ("--output_dir", tmp_path): f"--resume_from_checkpoint latest: there is no checkpoint in {tmp_path}.",
        ("--output_dir", tmp_path / "file"): f"--output_dir {tmp_path / 'file'} cannot be read: Not a directory.",
    }.items():
        with pytest.raises(UserError) as refused:
            found(*LATEST, *flags)
        assert str(refused.value) == message


def test_only_a_checkpoint_that_does_not_fit_the_model_is_replaced(tmp_path):
    run = unfinished_run(tmp_path / "run", 10, 20)
    config = parse(["--output_dir", str(run)])
    point = resume.find(config)
    assert resume.fitting(None, config, checkpoints.TASK) is None
    assert resume.fitting(point, config, checkpoints.TASK) is point
    assert (point.step, point.state["global_batch"]) == (20, 8)
