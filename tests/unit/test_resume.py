"""Whether a checkpoint's settings fit the run that resumes from it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_bert.checkpoint import resume
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import FLAGS
from hvd_bert.errors import UserError


@pytest.fixture
def check(monkeypatch):
    """check(saved settings, flags): resume a checkpoint of these settings with these flags."""

    def settings(config, task=None):
        flat = config.as_flat()
        return {f"--{name}": value for name, value in flat.items() if not FLAGS[name].may_change_on_resume}

    def run(saved: dict, *flags: str) -> None:
        monkeypatch.setattr(resume, "identity", settings)
        document = {"identity": saved, "global_batch": run.saved_batch, "rank_batch": 8, "step": 10}
        resume_point = ResumePoint(Path("checkpoint-10"), SimpleNamespace(documents={"state": document}))
        task = SimpleNamespace(plan=SimpleNamespace(global_batch=8))
        resume.check(resume_point, parse(list(flags)), task)

    run.saved_batch = 8
    run.saved = lambda *flags: settings(parse(list(flags)))
    return run


@pytest.mark.parametrize("flags", [[], ["--padding", "longest"], ["--pad_to_max_length"]], ids=str)
def test_same_settings_resume(check, flags):
    check(check.saved(*flags), *flags)


def test_another_padding_is_refused(check):
    with pytest.raises(UserError, match="--padding was none and is longest"):
        check(check.saved(), "--padding", "longest")


def test_two_names_for_one_padding_are_the_same(check):
    check(check.saved("--padding", "max_length"), "--pad_to_max_length")


def test_checkpoint_from_before_a_flag_has_its_default(check):
    old = check.saved()
    del old["--padding"], old["--pad_to_max_length"]
    check(old)
    with pytest.raises(UserError, match="--padding was none and is longest"):
        check(old, "--padding", "longest")


def test_another_global_batch_is_refused(check):
    """With the per-rank flags of the checkpoint another world size keeps its global batch; a flag states another."""
    check.saved_batch = 16
    check(check.saved())
    with pytest.raises(UserError, match="the global batch was 16 and is 8"):
        check(check.saved(), "--global_batch", "8")


@pytest.mark.parametrize(
    ("trains", "evaluates", "flags", "message"),
    [
        (False, False, (), "would neither train nor evaluate. Remove --no_do_train, or give data to evaluate on"),
        (True, False, ("--load_best_model_at_end",), "need evaluations during training: give data to evaluate on"),
        (True, False, (), ""),
        (False, True, (), ""),
    ],
)
def test_runs_without_anything_to_do(trains, evaluates, flags, message):
    task = SimpleNamespace(plan="a plan" if trains else None, evaluates=evaluates)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        resume.check_evaluation(parse([*flags]), task)
