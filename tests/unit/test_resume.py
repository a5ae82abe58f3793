"""The checkpoint from which a run resumes, the settings that must match it, and the requirements of a start."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from test_world import make_world
from transformers import BertConfig, BertModel

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.files import Contents
from hvd_bert.checkpoint.resume import ResumePoint, model_shape
from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import FLAGS
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.training import start

MODEL = torch.nn.Linear(3, 2)


def write(folder: Path, step: int, state: dict[str, Any] | None = None) -> Path:
    return files.write(folder, step, Contents({"model": dict(MODEL.state_dict())}, state or {"step": step}))


def unfinished_run(folder: Path, *steps: int) -> Path:
    """Make the folder of an unfinished run with checkpoints at the given steps."""
    folder.mkdir()
    (folder / "train_config.yaml").write_text("seed: 1\nresume_from_checkpoint: null\n")
    for step in steps:
        write(folder, step)
    return folder


def damaged(checkpoint: Path) -> Path:
    (checkpoint / "state.json").write_text("{}")
    return checkpoint


def found(*flags: object) -> Path | None:
    point = resume.find(parse([str(flag) for flag in flags]).as_flat())
    return point.folder if point else None


LATEST = ("--resume_from_checkpoint", "latest")


def test_an_unfinished_run_resumes_from_its_newest_checkpoint(tmp_path, monkeypatch):
    run = unfinished_run(tmp_path / "run", 10, 20)
    flags = ("--output_dir", run)
    assert found(*flags) == run / "checkpoint-20"
    assert found(*flags, "--no_do_train") is None
    assert found(*flags, "--overwrite_output_dir") is None
    assert found(*flags, "--overwrite_output_dir", *LATEST) == run / "checkpoint-20"
    monkeypatch.chdir(run)
    assert found() is None
    (run / "train_results.json").touch()
    assert found(*flags) is None
    assert found(*flags, *LATEST) == run / "checkpoint-20"


def test_a_run_from_a_named_checkpoint_resumes_from_newer_checkpoints_in_the_run(tmp_path):
    named = unfinished_run(tmp_path / "other", 10, 20) / "checkpoint-10"
    run = unfinished_run(tmp_path / "run")
    again = ("--resume_from_checkpoint", named, "--output_dir", run)
    assert found(*again) == named  # the run stopped before its first checkpoint
    write(run, 10)
    assert found(*again) == run / "checkpoint-10"
    write(run, 15)
    damaged(write(run, 20))
    assert found(*again) == run / "checkpoint-15"
    assert found(*again, "--overwrite_output_dir") == named
    (tmp_path / "link").symlink_to(run)
    inside = run / "checkpoint-10"
    assert found("--resume_from_checkpoint", inside, "--output_dir", tmp_path / "link") == inside


def test_a_run_that_is_not_ahead_of_the_named_checkpoint_stays(tmp_path):
    named = unfinished_run(tmp_path / "other", 20) / "checkpoint-20"
    earlier = write(unfinished_run(tmp_path / "run"), 19)
    for change in (lambda folder: folder, damaged):
        change(earlier)
        with refused(f"--output_dir {tmp_path / 'run'}", named, "--overwrite_output_dir"):
            found("--resume_from_checkpoint", named, "--output_dir", tmp_path / "run")


def test_checkpoints_that_cannot_be_used_are_named(tmp_path, caplog):
    run = unfinished_run(tmp_path / "run", 10)
    only_model = write(run, 20, {"step": 20, "model_only": True})
    broken = damaged(write(run, 30))
    assert found("--output_dir", run) == run / "checkpoint-10"
    for problem in (broken / "state.json", only_model, "--save_only_model"):
        assert str(problem) in caplog.text
    empty = damaged(run / "checkpoint-10")
    with refused(run, broken, only_model, empty, "Nothing was changed", "--overwrite_output_dir"):
        found("--output_dir", run)
    for named in (broken, empty):
        with pytest.raises(UserError, match=f"--resume_from_checkpoint {named} cannot be used: {named}"):
            found("--resume_from_checkpoint", named)


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("checkpoint-10/trainer_state.json", ["Hugging Face's Trainer", "--model_name_or_path", "/checkpoint-10."]),
        ("trainer/checkpoint-10/trainer_state.json", ["/trainer/checkpoint-10."]),
        ("last.ckpt", ["Lightning", "`save_pretrained`"]),
        ("state/random_states_0.pkl", ["Accelerate", "`save_pretrained`"]),
        ("lora/adapter_config.json", ["PEFT", "`save_pretrained`"]),
        ("model/model.safetensors", ["without the state of its training", "--model_name_or_path", "/model."]),
        ("notes/a.txt", ["is not a checkpoint"]),
    ],
)
def test_checkpoints_of_other_programs_are_described(tmp_path, file, named):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    if "--model_name_or_path" in named:
        (path.parent / "config.json").write_text("{}")
        with refused(f"--model_name_or_path {path.parent}."):
            found("--resume_from_checkpoint", path.parent / "config.json")
    given = tmp_path / path.relative_to(tmp_path).parts[0]
    with refused(f"--resume_from_checkpoint {given}", *named):
        found("--resume_from_checkpoint", given)
    with refused("does not exist"):
        found("--resume_from_checkpoint", tmp_path / "nowhere")


def test_latest_needs_a_folder_with_a_checkpoint(tmp_path):
    with refused("--resume_from_checkpoint latest", "--output_dir"):
        found(*LATEST)
    with refused("--resume_from_checkpoint latest", tmp_path):
        found(*LATEST, "--output_dir", tmp_path)


# --- settings --------------------------------------------------------------------------------------


def identity(*flags: str, mixture: Any = ()) -> dict[str, Any]:
    plan: Any = SimpleNamespace(num_windows=7, mixture=mixture)
    return resume.identity(parse(list(flags)).as_flat(), MODEL, {"the data": "SQuAD"}, plan)


def point(folder: Path = Path("checkpoint-10"), **state: Any) -> ResumePoint:
    return ResumePoint(folder, Contents({}, {"global_batch": 8, "rank_batch": 8, "step": 10} | state))


def check(saved: dict, *flags: str, batch: int = 8) -> None:
    """Check flags against a checkpoint with the identity `saved` and the global batch `batch`."""
    args = parse(list(flags)).train
    facts = {"identity": identity(*flags), "rank_batch": args.rank_batch, "cpu_kernels": None}
    resume.check(point(identity=saved, global_batch=batch), facts, args, 8, MODEL, {})


def test_identity_has_model_data_and_the_flags_that_affect_learning():
    found = identity("--learning_rate", "3e-5")
    learned_by = {f"--{name}" for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    data = {"the model": model_shape(MODEL), "the data": "SQuAD", "the number of training windows": 7}
    assert {name: found[name] for name in found.keys() - learned_by} == data
    assert learned_by < found.keys() and found["--learning_rate"] == 3e-5
    assert identity(mixture=((4, 4), (4, 8)))["the windows per epoch of each file"] == "[4, 8]"


def test_shape_of_a_model_is_part_of_the_checkpoint_format():
    assert model_shape(MODEL) == "2 tensors, 8 parameters, aa902f8e6f66"


def test_equal_settings_resume():
    for flags in ([], ["--padding", "longest"], ["--pad_to_max_length"]):
        check(identity(*flags), *flags)
    check(identity("--padding", "max_length"), "--pad_to_max_length")  # both flags mean the same padding
    # With unchanged per-rank flags, another world size keeps the checkpoint's global batch.
    check(identity(), batch=16)
    old = identity()  # a checkpoint from a version without these flags
    del old["--padding"], old["--pad_to_max_length"]
    check(old | {"--removed": False})
    with refused("--removed was True"):
        check(old | {"--removed": True})
    with refused("--padding was none and is longest"):
        check(old, "--padding", "longest")


@pytest.mark.parametrize(
    ("key", "value", "refuses"),
    [
        ("hidden_act", "relu", True),
        ("num_attention_heads", 1, True),
        ("layer_norm_eps", 1e-5, True),
        ("hidden_dropout_prob", 0.3, True),
        ("pad_token_id", 1, True),
        ("a_later_versions_key", 1, False),
        ("id2label", {"0": "a", "1": "b"}, False),
        ("dtype", "bfloat16", False),
        ("problem_type", "regression", False),
        ("_name_or_path", "elsewhere", False),
    ],
)
def test_a_model_that_computes_differently_is_refused(tmp_path, key, value, refuses):
    size = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4}
    model = BertModel(BertConfig(vocab_size=5, **size))
    facts = {"identity": resume.in_this_version({}), "rank_batch": 8, "cpu_kernels": None}
    arguments: Any = (point(tmp_path, identity={}), facts, parse([]).train, 8, model, {})
    resume.check(*arguments)  # the checkpoint has no config.json
    config = json.loads(model.config.to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config))
    resume.check(*arguments)
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with refused(f"the model's {key} was {value}") if refuses else nullcontext():
        resume.check(*arguments)


def test_shape_of_a_custom_model_includes_the_model_inside():
    size = {"vocab_size": 5, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4}
    gelu, renamed, relu = (
        model_shape(torch.nn.Sequential(BertModel(BertConfig(**size, hidden_act=act, id2label=names))))
        for act, names in (("gelu", None), ("gelu", {0: "a", 1: "b"}), ("relu", None))
    )
    assert gelu == renamed != relu


@pytest.mark.parametrize(
    ("file", "named"),
    [("b.json", "is b.json"), ("a.json", "files named a.json"), (("b/a.json", "b.json"), "is a.json, b.json")],
)
def test_other_training_data_are_named_by_their_files(tmp_path, file, named):
    (tmp_path / "train_config.yaml").write_text("train_file: /data/a.json\n")
    args, now = parse([]).train, identity() | {"the training data": "1" * 12}
    facts = {"identity": now, "rank_batch": args.rank_batch, "cpu_kernels": None}
    saved = point(tmp_path / "checkpoint-10", identity=now | {"the training data": "2" * 12})
    with refused("the training data", named):
        resume.check(saved, facts, args, 8, MODEL, {"train_file": file})


def test_every_difference_is_listed():
    with refused("checkpoint-10", "--padding was none and is longest", "global batch was 16 and is 8"):
        check(identity(), "--padding", "longest", "--per_device_train_batch_size", "4", batch=16)
    with refused("--answer_language was squad and is zh"):
        check({}, "--answer_language", "zh")
    with refused("the data was a and is SQuAD"):
        check(identity() | {"the data": "a"})
    with refused("the global batch was 16 and is 8"):  # only per-rank flags keep the checkpoint's batch
        check(identity(), "--global_batch", "8", batch=16)


def test_batch_beyond_an_epoch_is_refused_except_on_resume():
    plan = BatchPlan(np.full(20, 20, np.int32), global_batch=100_000, accumulation=1, size=2, seed=0, crossover=1)
    for size in (100_000, 21):
        with refused(size, 20, "--per_device_train_batch_size", error=CollectiveError) as refusal:
            resume.keep_global_batch(replace(plan, global_batch=size), None, make_world())
        assert refusal.value.status == EXIT_BAD_INPUT
    whole = replace(plan, global_batch=20)
    assert resume.keep_global_batch(whole, None, make_world()) is whole
    assert resume.keep_global_batch(plan, point(global_batch=24), make_world()).global_batch == 24


# --- requirements of a start ------------------------------------------------------------------------------

BEST = ["--load_best_model_at_end"]


@pytest.mark.parametrize(
    ("trains", "evaluates", "flags", "named"),
    [
        (False, False, [], "--no_do_train"),
        (True, False, BEST, "--load_best_model_at_end"),
        (True, True, [*BEST, "--eval_strategy", "no"], "--eval_strategy"),
    ],
)
def test_a_run_needs_data_for_its_flags(trains, evaluates, flags, named):
    task: Any = SimpleNamespace(plan="a plan" if trains else None, evaluates=evaluates)
    with refused(named):
        start.check_task(parse(flags), task)


@pytest.mark.parametrize(
    ("elastic", "flags", "named"),
    [
        (True, ["--strategy", "none", "--output_dir", "out"], "--strategy horovod"),
        (False, ["--strategy", "ddp", "--elastic"], "--strategy horovod"),
        (False, ["--elastic"], "--host-disc"),
    ],
)
def test_elastic_needs_its_launcher(elastic, flags, named):
    world = make_world()
    world.elastic = elastic
    with refused(named):
        start.check_requirements(parse(flags), world)


def test_another_cpu_model_is_warned_of(caplog):
    saved = {"cpu": "AMD", "linear": "torch"}
    for now in (saved, None, {"cpu": "Intel", "norm": "torch"}):  # a missing entry means torch's kernel
        assert not caplog.messages
        resume._check_cpu(point(cpu_kernels=saved), now)
    assert "(cpu was AMD and is Intel)" in caplog.text


def test_a_missing_latest_checkpoint_is_warned_about_or_refused(tmp_path, caplog):
    run = unfinished_run(tmp_path / "run", 10)
    (run / "latest").write_text("checkpoint-20\n")
    assert found("--output_dir", run) == run / "checkpoint-10"
    lost = f"{run / 'latest'} names checkpoint-20, which is missing"
    assert lost in caplog.text
    for name in ("elsewhere", "checkpoint-10"):
        (run / "latest").write_text(name)
        assert not files.lost(run)
    (run / "latest").write_text("checkpoint-20\n")
    (run / "checkpoint-10").rename(run / "elsewhere")
    with refused(lost, "Nothing was changed", "--overwrite_output_dir"):
        found("--output_dir", run)
