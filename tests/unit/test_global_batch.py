"""The global batch and the learning rate of flags and presets on several numbers of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from tables import each
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.errors import UserError
from hvd_bert.tasks.base import make_plan
from hvd_bert.train.optim import scaled_learning_rate

LENGTHS = np.full(1000, 150, np.int32)


def plan_of(size: int, *flags: str) -> BatchPlan:
    return make_plan(LENGTHS, parse(list(flags)).train, 4608, make_world(size=size))


@each("size", [1, 2, 3, 4, 5, 8, 32])
def test_global_batch_is_kept_on_any_number_of_ranks(size):
    plan = plan_of(size, "--global_batch", "32", "--per_device_train_batch_size", "8")
    taken = [[len(ids) for ids in plan.rank_windows(0, rank)] for rank in range(size)]
    assert sum(map(sum, taken)) == plan.global_batch == 32
    assert max(map(max, taken)) <= 8 and all(map(sum, taken))
    assert len({len(passes) for passes in taken}) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--global_batch", "3"], "--global_batch 3: fewer windows than the 4 devices"),
        (
            ["--global_batch", "32", "--gradient_accumulation_steps", "2"],
            "--gradient_accumulation_steps 2: --global_batch 32 takes 1 pass(es) of at most 8 windows on each of 4",
        ),
        (["--global_batch", "0"], "--global_batch 0: must be at least 1"),
    ],
    ids=" ".join,
)
def test_global_batch_that_does_not_fit_is_refused(flags, words):
    with pytest.raises(UserError) as refused:
        plan_of(4, *flags)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("preset", "sizes", "batches", "learning_rate", "epochs"),
    [
        # The BERT paper's (Devlin et al. 2019, section 4.2).
        ("squad_v1_paper", (1, 2, 3, 4, 8, 32), (32,) * 6, 5e-5, 3),
        # The course reports': per device.
        ("squad_v1_10k", (1, 2, 4), (4, 8, 16), 3e-5, 4),
        ("squad_v2", (1, 2, 4), (8, 16, 32), 5e-5, 2),
    ],
)
def test_preset_on_several_numbers_of_ranks(preset, sizes, batches, learning_rate, epochs):
    args = parse(["--config", preset]).train
    assert args.num_train_epochs == epochs
    assert [plan_of(size, "--config", preset).global_batch for size in sizes] == list(batches)
    assert {scaled_learning_rate(args, size) for size in sizes} == {learning_rate}


def test_paper_preset_takes_more_passes_of_fewer_windows():
    plan = plan_of(1, "--config", "squad_v1_paper", "--per_device_train_batch_size", "8")
    assert (plan.global_batch, plan.accumulation) == (32, 4)
