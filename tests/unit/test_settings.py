"""What the settings come to: the steps, and when they are scored and logged."""

from __future__ import annotations

import pytest

from hvd_bert.config.command_line import parse


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
        (["--eval_steps", "12"], [12, 24]),
        (["--eval_steps", "30"], []),  # the end is scored in any case
    ],
)
def test_steps_that_are_scored(flags, expected):
    train = parse(flags).train
    assert [step for step in range(1, 31) if train.evaluates_after(step, 10, 30)] == expected


def test_steps_that_are_logged():
    train = parse(["--logging_steps", "4"]).train
    assert [step for step in range(1, 11) if train.logs_after(step, 10)] == [1, 4, 8, 10]


def test_scoring_by_steps_follows_the_logging():
    args = parse(["--eval_strategy", "steps", "--logging_steps", "5"]).train
    assert [step for step in range(1, 21) if args.evaluates_after(step, 7, 20)] == [5, 10, 15]
