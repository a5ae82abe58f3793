"""Whether a checkpoint's settings fit the run that resumes from it, and what resuming needs."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import test_hostile_checkpoints as checkpoints
from test_world import heard, make_world
from transformers import BertConfig

from hvd_bert.checkpoint import resume
from hvd_bert.checkpoint.fit import shape_of
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import FLAGS
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.model.bert import new_model
from hvd_bert.train import saving


@pytest.fixture
def check(monkeypatch):
    """check(saved settings, flags): resume a checkpoint of these settings with these flags."""

    def settings(config):
        flat = config.as_flat()
        return {f"--{name}": value for name, value in flat.items() if not FLAGS[name].may_change_on_resume}

    def run(saved: dict, *flags: str) -> None:
        def identity(config, of):
            assert of is task
            return settings(config)

        monkeypatch.setattr(resume, "identity", identity)
        document = {"identity": saved, "global_batch": run.saved_batch, "rank_batch": 8, "step": 10}
        resume_point = ResumePoint(run.folder, SimpleNamespace(documents={"state": document}))
        task = SimpleNamespace(plan=SimpleNamespace(global_batch=8), model=run.model)
        resume.check(resume_point, parse(list(flags)), task)

    run.saved_batch, run.folder, run.model = 8, Path("checkpoint-10"), checkpoints.MODEL
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


def test_message_of_a_run_without_anything_to_do():
    with pytest.raises(UserError) as refused:
        resume.check_evaluation(parse([]), SimpleNamespace(plan=None, evaluates=False))
    assert str(refused.value) == (
        "The run would neither train nor evaluate. Remove --no_do_train, or give data to evaluate on"
        " (--validation_file) without --no_do_eval."
    )


def test_identity_has_the_model_the_data_and_what_is_learned_by():
    config = parse(["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3"])
    task = SimpleNamespace(
        plan=SimpleNamespace(num_windows=7), model=checkpoints.MODEL, identity=lambda: {"the data": "SQuAD"}
    )
    identity = resume.identity(config, task)
    learned_by = {name: value for name, value in identity.items() if name.startswith("--")}
    assert set(learned_by) == {f"--{name}" for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    assert learned_by["--learning_rate"] == config.train.learning_rate
    assert {name: value for name, value in identity.items() if name not in learned_by} == {
        "the model": shape_of(checkpoints.MODEL), "the data": "SQuAD", "the number of training windows": 7
    }  # fmt: skip
    assert resume.rank_batch(config) == 12


def test_every_difference_is_listed(check, caplog):
    caplog.set_level(logging.INFO)
    check(check.saved())
    assert [record.getMessage() for record in caplog.records] == ["Resuming from step 10: checkpoint-10"]
    check.saved_batch = 16
    with pytest.raises(UserError) as refused:
        check(check.saved() | {"the data": "a"}, "--padding", "longest", "--per_device_train_batch_size", "4")
    assert str(refused.value) == (
        "checkpoint-10 cannot be resumed: --padding was none and is longest; the data was a and is None; the global"
        " batch was 16 and is 8. Use the settings that it was made with, use another --output_dir, or add"
        " --overwrite_output_dir to train from the start."
    )


def test_batch_beyond_an_epoch_is_refused_unless_it_is_a_checkpoints():
    plan = BatchPlan(np.full(20, 20, np.int32), global_batch=100_000, accumulation=1, size=2, seed=0, crossover=1)
    for size, windows in ((100_000, 20), (21, 20)):
        with pytest.raises(CollectiveError, match=rf"{size} .* {windows}\. .*--per_device_train_batch_size") as refused:
            resume.keep_global_batch(replace(plan, global_batch=size), None, make_world())
        assert refused.value.status == EXIT_BAD_INPUT
    whole = replace(plan, global_batch=20)
    assert resume.keep_global_batch(whole, None, make_world()) is whole
    point = SimpleNamespace(state={"global_batch": 24})  # made by an earlier version, or now on more ranks
    assert resume.keep_global_batch(plan, point, make_world()).global_batch == 24


TINY = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_attention_heads": 1}, "num_attention_heads in the model's config.json was 2 and is 1"),
        ({"hidden_act": "relu"}, "hidden_act in the model's config.json was gelu and is relu"),
        ({"attention_probs_dropout_prob": 0.3}, "attention_probs_dropout_prob in .* was 0.1 and is 0.3"),
        ({"layer_norm_eps": 0.001}, "layer_norm_eps in .* was 1e-12 and is 0.001"),
        ({"architectures": ["Other"], "initializer_range": 0.3, "use_cache": False, "note": "mine"}, ""),
    ],
    ids=str,
)
def test_a_model_that_computes_something_else_is_refused(check, tmp_path, changed, message):
    new_model(BertConfig(**TINY), None, 0).config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"transformers_version": "9.0", "of_9.0": True}))
    check.folder, check.model = tmp_path, new_model(BertConfig(**TINY | changed), None, 0)
    with pytest.raises(UserError, match=f"cannot be resumed: {message}. Use") if message else nullcontext():
        check(check.saved())


def test_configuration_that_cannot_be_read_is_an_error(check, tmp_path):
    check.folder, check.model = tmp_path, new_model(BertConfig(**TINY), None, 0)
    for content in (None, "[]", "{"):
        if content:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=f"{tmp_path / 'config.json'} cannot be compared with the model"):
            check(check.saved())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_global_batch_stays_that_of_the_checkpoint(rank, caplog):
    caplog.set_level(logging.INFO)
    plan = BatchPlan(np.full(64, 20, np.int32), global_batch=8, accumulation=1, size=2, seed=0, crossover=1)
    for saved, passes in ((32, 4), (8, 1)):
        world = heard(make_world(rank, 2), [saved, None])  # only rank 0 has read the checkpoint
        point = SimpleNamespace(state={"global_batch": saved}) if rank == 0 else None
        resumed = resume.keep_global_batch(plan, point, world)
        assert (resumed.global_batch, resumed.accumulation) == (saved, passes)
    assert resume.keep_global_batch(plan, None, make_world()) is plan
    message = "The global batch stays 32: 4 micro-batch(es) per step on 2 rank(s)."
    assert [record.getMessage() for record in caplog.records] == [message]


class State:
    """A training's state that records what is restored, or raises."""

    def __init__(self, world, error=None) -> None:
        self.world, self.error, self.restored = world, error, []

    def restore(self, tensors, rest, seed) -> None:
        if self.error:
            raise self.error
        self.restored.append((dict(tensors), rest, seed))


def test_all_ranks_restore_what_rank_0_has_read():
    document, tensors = {"step": 10}, {"model": {}}
    point = ResumePoint(Path("checkpoint-10"), SimpleNamespace(tensors=tensors, documents={"state": document}))
    rank_0, rank_1 = State(make_world()), State(heard(make_world(1, 2), [True, None]))
    saving.restore(rank_0, None, 3)
    assert not rank_0.restored
    saving.restore(rank_0, point, 3)
    assert rank_0.restored == [({"model": {}}, document, 3)]
    assert not tensors  # gigabytes
    saving.restore(rank_1, None, 3)
    assert rank_1.restored == [({}, {}, 3)]


def test_content_that_does_not_fit_is_an_error_of_all_ranks():
    point = ResumePoint(Path("checkpoint-10"), SimpleNamespace(tensors={}, documents={"state": {}}))
    with pytest.raises(CollectiveError) as refused:
        saving.restore(State(make_world(), KeyError("lr")), point, 3)
    message = (
        " cannot be resumed: its content does not fit this run (KeyError: 'lr'). Name another checkpoint"
        " (--resume_from_checkpoint), or add --overwrite_output_dir to train from the start."
    )
    assert str(refused.value) == f"checkpoint-10{message}"
    with pytest.raises(CollectiveError) as refused:
        saving.restore(State(heard(make_world(1, 2), [True, None]), KeyError("lr")), None, 3)
    assert str(refused.value) == message
    with pytest.raises(CollectiveError, match=r"^a rank was lost$"):
        saving.restore(State(make_world(), CollectiveError("a rank was lost")), point, 3)


# --- what a run needs ------------------------------------------------------------------------------

NEEDS_EVALUATIONS = (
    "--load_best_model_at_end and --early_stopping_patience need evaluations during training: give data to evaluate on"
    " (--validation_file), and --eval_strategy epoch or steps."
)


@pytest.mark.parametrize("flags", [["--load_best_model_at_end"], ["--early_stopping_patience", "2"]], ids=str)
def test_the_best_model_needs_evaluations(flags):
    evaluating = SimpleNamespace(plan="a plan", evaluates=True)
    resume.check_evaluation(parse([*flags, "--eval_strategy", "epoch"]), evaluating)
    resume.check_evaluation(parse(["--eval_strategy", "no"]), evaluating)
    for strategy, task in (("no", evaluating), ("epoch", SimpleNamespace(plan="a plan", evaluates=False))):
        with pytest.raises(UserError) as refused:
            resume.check_evaluation(parse([*flags, "--eval_strategy", strategy]), task)
        assert str(refused.value) == NEEDS_EVALUATIONS


NEEDS_LAUNCHER = (
    "--elastic needs Horovod's elastic launcher: horovodrun -np N --min-np M --host-discovery-script"
    " scripts/discover_hosts.sh python -m hvd_bert.train --elastic ..."
)
NEEDS_CHECKPOINTS = (
    "Under Horovod elastic a new world resumes from the last checkpoint: give --output_dir, on a file system that all"
    " hosts share, and a --save_steps above 0."
)


@pytest.mark.parametrize(
    ("elastic", "flags", "message"),
    [
        (True, ["--strategy", "none", "--output_dir", "out"], "Horovod elastic needs --strategy horovod, not none."),
        (False, ["--elastic"], NEEDS_LAUNCHER),
        (False, [], ""),
        (True, [], NEEDS_CHECKPOINTS),
        (True, ["--output_dir", "out", "--save_steps", "0"], NEEDS_CHECKPOINTS),
        (True, ["--output_dir", "out", "--elastic"], ""),
        (True, ["--no_do_train"], ""),
    ],
)
def test_elastic_needs_its_launcher_and_checkpoints(elastic, flags, message):
    world = make_world()
    world.elastic = elastic
    with pytest.raises(UserError) if message else nullcontext() as refused:
        resume.check_elastic(parse(flags), world)
    assert not message or str(refused.value) == message


def test_the_next_elastic_world_of_a_run_without_checkpoints_trains_from_the_start(tmp_path, monkeypatch):
    config, world = parse(["--output_dir", str(tmp_path), "--overwrite_output_dir"]), make_world()
    world.elastic, world.generation = True, 1
    monkeypatch.setattr(resume, "TAKEN_OVER", {str(tmp_path)})
    resume.check_elastic(config, world)
    assert config.train.overwrite_output_dir is False
    assert config.checkpoint.resume_from_checkpoint is None
