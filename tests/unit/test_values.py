"""Values on command lines: names and paths, and flags that are given twice or replaced."""

from __future__ import annotations

import pytest
from tables import each

from hvd_bert.config.command_line import overriding, parse, without
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.tasks.base import make_plan
from hvd_bert.tools.bench import __main__ as bench
from hvd_bert.tools.bench.points import Plan


def refusal(*flags: str) -> str:
    with pytest.raises(UserError) as refused:
        parse(list(flags))
    return str(refused.value)


@each("name", ["train_file", "model_name_or_path"])
@each(
    ("value", "words"),
    [
        ("", "'' is empty: give a value, or leave the flag out"),
        ("a\ud800b", r"'a\ud800b' is not valid UTF-8"),
        ("a\udcffb", r"'a\udcffb' is not valid UTF-8"),  # the byte 0xff
    ],
    ids=["empty", "surrogate", "byte"],
)
def test_names_that_no_file_has(name: str, value: str, words: str) -> None:
    message = refusal(f"--{name}={value}")
    assert words in message and f"--{name}" in message and len(message) < 600
    message.encode()


def test_the_last_value_counts() -> None:
    assert parse(["--do_train", "--no_do_train"]).train.do_train is False
    assert bench.parse(["--steps", "7", "--steps=8"])[0].steps == 8
    assert Plan(("deepspeed",), (1,), "weak", 1, 2, 1, None, ("--zero_stage", "2", "--zero_stage=1")).divided.owned == {
        "deepspeed": ["--zero_stage=1"]
    }


def test_the_benchmark_replaces_the_users_length() -> None:
    config = bench.parse(["--steps", "4", "--repeats", "2", "--save_steps", "3", "--do_eval", "--max-steps", "5"])[1]
    assert (config.checkpoint.save_steps, config.train.do_eval, config.train.max_steps) == (0, False, 12)


def test_without_removes_all_spellings() -> None:
    words = ["--seed", "1", "--max-seq-length=9", "--no_do_eval", "--bf16", "--timeline-file", "a"]
    words += ["--null_score_diff_threshold", "-1e-5"]
    left = ["--seed", "1", "--bf16", "--null_score_diff_threshold", "-1e-5"]
    assert without(words, ["max_seq_length", "do_eval", "timeline"]) == left
    assert overriding(words, ["--seed=2", "--do_eval"]) == [*words[2:3], *words[4:], "--seed=2", "--do_eval"]


def test_more_micro_batches_than_windows() -> None:
    args = parse(["--gradient_accumulation_steps", str(2**32 - 1)]).train
    with pytest.raises(UserError, match=r"--gradient_accumulation_steps 4294967295: .* than the 20 windows"):
        make_plan([8] * 20, args, 1, World())
