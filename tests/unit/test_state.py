"""The training's state: exact random numbers, the best evaluation, copies in memory that is kept."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from test_world import make_world

from hvd_bert.checkpoint.schedule import Best
from hvd_bert.training import state
from hvd_bert.training.optim import WeightAverage
from hvd_bert.training.state import seed_ranks


def draw() -> list[float]:
    gauss = [random.gauss(0, 1), float(np.random.standard_normal())]  # both generators keep a spare number
    return [*gauss, random.random(), float(np.random.rand()), *torch.rand(3).tolist(), *torch.randn(5).tolist()]


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 3, 700])
def test_random_numbers_continue(drawn_before):
    seed_ranks(5, 0, make_world())
    for _ in range(drawn_before):
        draw()
    kept = load(save(state.random_numbers([])))  # as in a checkpoint
    expected = [draw() for _ in range(3)]
    seed_ranks(6, 0, make_world())
    state.set_random_numbers(kept, [])
    assert [draw() for _ in range(3)] == expected


def test_seeds_ranks_and_steps_draw_differently():
    drawn = []
    for seed, rank, step in itertools.product(range(3), range(3), (0, 1, 9)):
        seed_ranks(seed, step, make_world(rank, 3))
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [27, 27, 27]
    seed_ranks(42, 0, make_world(1, 2))  # the same in all versions
    drawn = [random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()]
    assert drawn == [0.20326353038941192, 0.3458528196027807, 0.8636737013983086]


def test_random_numbers_of_all_gpus_of_a_rank_are_restored(monkeypatch):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    states = {first: torch.tensor([1]), second: torch.tensor([2])}
    restored: dict[torch.device, torch.Tensor] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda kept, gpu: restored.update({gpu: kept}))
    kept = state.random_numbers(list(states))
    state.set_random_numbers(kept, list(states))
    assert restored == states
    del kept["cuda1"], restored[second]  # an older checkpoint
    state.set_random_numbers(kept, list(states))
    assert restored.keys() == {first}


@pytest.mark.parametrize(
    ("metric", "values", "best", "since"),
    [
        ("f1", [10.0, 30.0, 20.0, 30.0], (30.0, 2), 2),
        ("eval_loss", [3.0, 1.0, 2.0, 1.0], (1.0, 2), 2),
        ("exact_match", [math.nan, 5.0, math.nan], (5.0, 2), 1),
        ("eval_loss", [math.nan], (None, 0), 1),
    ],
)
def test_best(metric, values, best, since):
    kept = Best(metric, "min" if metric == "eval_loss" else "max")
    gains = [kept.update(step, {metric: value}) for step, value in enumerate(values, 1)]
    assert (kept.value, kept.step) == best
    assert kept.since == since
    assert gains.count(True) == (2 if len(values) == 4 else int(best[1] > 0))


def test_average_follows_the_steps_that_were_taken():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average, start = WeightAverage(model, 0.75), model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
        average.update(torch.tensor(math.nan))  # a step that was skipped
        with average.applied():
            assert torch.equal(model.weight, start)
        average.update(torch.tensor(2.0))
        with average.applied():
            torch.testing.assert_close(model.weight, start + 0.25)
    assert torch.equal(model.weight, start + 1)
