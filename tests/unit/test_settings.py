"""The settings: properties of the flags, the number of steps, and which steps are evaluated and logged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvd_bert.config.command_line import parse
from hvd_bert.config.settings import FLAGS, PACKAGE, STRATEGIES
from hvd_bert.errors import UserError

# A resumed run must have the same values as its checkpoint.
FIXED_ON_RESUME = """
dropout attention_dropout version_2_with_negative max_seq_length padding pad_to_max_length doc_stride max_train_samples
do_train learning_rate lr_base_batch_size weight_decay layerwise_lr_decay ema_decay lora_rank lora_alpha adam_beta1
adam_beta2 adam_epsilon max_grad_norm num_train_epochs max_steps lr_scheduler_type warmup_ratio warmup_steps lr_scaling
lr_scaling_limit seed bf16 fp16 deterministic question_column context_column answer_column bad_examples task optim
torch_compile tf32 metric_for_best_model fp16_allreduce bf16_allreduce
"""
MAY_CHANGE_ON_RESUME = """
model_name_or_path config_name tokenizer_name cache_dir model_revision dataset_name dataset_config_name train_file
validation_file n_best_size max_answer_length null_score_diff_threshold max_eval_samples output_dir overwrite_output_dir
do_eval per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps global_batch logging_steps
report_to eval_strategy eval_steps gradient_checkpointing cpu_kernels save_steps save_total_limit save_only_model
resume_from_checkpoint load_best_model_at_end early_stopping_patience requeue elastic strategy zero_stage num_groups
num_threads timeline timeline_steps profile peak_tflops
"""


@pytest.mark.parametrize("name", FLAGS)
def test_properties_of_a_flag(name):
    flag = FLAGS[name]
    assert flag.help.endswith(".") and "\n" not in flag.help and len(flag.help) <= 120
    assert flag.default is not None or flag.default_text, "--help must not show None"
    assert bool(flag.negated_help) == (flag.default is True)
    assert flag.owner in ("", *STRATEGIES)
    assert set(flag.replaces) <= FLAGS.keys() - {name}


def test_flags_that_may_change_on_resume():
    """A new flag must be in one of the lists: some sections' flags may change unless their line says no."""
    fixed = set(FIXED_ON_RESUME.split())
    assert FLAGS.keys() == fixed | set(MAY_CHANGE_ON_RESUME.split())
    assert {name for name, flag in FLAGS.items() if not flag.may_change_on_resume} == fixed


@pytest.mark.parametrize(
    ("flags", "steps"),
    [([], 30), (["--num_train_epochs", "1.45"], 15), (["--max_steps", "7"], 7), (["--num_train_epochs", "0.01"], 1)],
)
def test_total_steps(flags, steps):
    assert parse(flags).train.total_steps(steps_per_epoch=10) == steps


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [10, 20]),
        (["--eval_strategy", "no"], []),
        (["--eval_steps", "12", "--eval_strategy", "no"], []),  # as in run_qa
        (["--eval_steps", "12", "--config", "sample_v2"], [12, 24]),  # a preset with --eval_strategy no
        (["--eval_strategy", "steps", "--logging_steps", "15"], [15]),
        (["--eval_steps", "30"], []),  # the final model is always evaluated
    ],
)
def test_steps_that_are_evaluated(flags, expected):
    train = parse(flags).train
    assert [step for step in range(1, 31) if train.evaluates_after(step, 10, 30)] == expected


# YAML files of flags: values that YAML would change, and files that are refused

pytestmark = pytest.mark.timeout(60)  # a file that blocks must fail its test soon


def write(folder: Path, content: str | bytes) -> str:
    path = folder / "settings.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refusal(name: str) -> str:
    with pytest.raises(UserError) as refused:
        parse(["--config", name])
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("timeline_steps: 1:30", "timeline_steps", "1:30"),
        ("eval_strategy: no", "eval_strategy", "no"),
        ("\ufeffseed: 5", "seed", 5),
        ("validation_file: '{package}/sample/dev.json'", "validation_file", f"{PACKAGE}/sample/dev.json"),
        ("output_dir: null", "output_dir", None),
        ("bf16: on", "bf16", True),
        ("null_score_diff_threshold: -.inf", "null_score_diff_threshold", float("-inf")),
        ("learning_rate: 1e-3\nseed: &a 3\nmax_steps: *a", "max_steps", 3),
    ],
)
def test_values_are_those_of_the_command_line(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert parse(["--config", write(tmp_path, text)]).as_flat()[name] == value


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("learning_rat: 1", ["'learning_rat'", "did you mean learning_rate?"]),
        ("seed: [1, 2]", ["'seed'", "list"]),
        ("seed: red", ["--seed", "'red'"]),
        ("seed: 1\nbf16: true\nseed: 2\n", ["'seed'", "lines 1 and 3"]),
        ("seed: " + "9" * 5000, ["--seed", "'99"]),
        (b"train_file: a\xff\n", ["byte 13"]),
        ("seed: !!python/object/apply:os.getcwd []", ["'seed'"]),
        ("? [a]\n: 1\n", ["flag: value"]),
        ("", ["flag: value"]),
        ("seed: 1\n  learning_rate: [", ["YAML", "line 2"]),
        ("{a: " * 20_000, ["recursion"]),
        ("#" * 2_000_000, ["1 MiB"]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_refused(tmp_path: Path, content: str | bytes, named: list[str]) -> None:
    name = write(tmp_path, content)
    message = refusal(name)
    assert message.startswith(f"--config {name}: ") and len(message) < 1000
    assert all(value in message for value in named), message


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        assert refusal(name).startswith(f"--config {name}: cannot be read")
