"""Prefetched batches are those of the plan, in its order, from any step that training resumes at."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.data.prefetch import AHEAD, Prefetcher


@pytest.fixture
def plan() -> BatchPlan:
    lengths = np.arange(10, 32, dtype=np.int32)
    return BatchPlan.of_rank_batch(lengths, rank_batch=2, accumulation=2, size=2, seed=3, crossover=100)


@pytest.mark.parametrize("first", [0, 2, 7])
def test_batches_are_those_of_the_plan(plan, first):
    batches = Prefetcher(plan, lambda ids: ids.tolist(), rank=1, first=first)  # type: ignore[arg-type, return-value]
    for step in range(first, first + 8):
        expected = [ids.tolist() for ids in plan.rank_windows(step, 1)]
        assert list(batches.of_step(step)) == expected
    batches.close()


def test_next_batches_are_made_in_the_background(plan):
    made, enough = [], threading.Event()

    def collate(ids: np.ndarray) -> int:
        made.append(threading.current_thread())
        if len(made) == 1 + AHEAD:
            enough.set()
        return len(made)

    batches = Prefetcher(plan, collate, rank=0, first=0)  # type: ignore[arg-type]
    next(batches.of_step(0))
    assert enough.wait(30)
    assert threading.main_thread() not in made
    batches.close()


def test_error_of_a_batch_is_raised_when_it_is_requested(plan):
    def broken(ids: np.ndarray) -> None:
        raise OSError("the cache is gone")

    batches = Prefetcher(plan, broken, rank=0, first=0)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="the cache is gone"):
        next(batches.of_step(0))
    batches.close()


def test_steps_must_be_requested_in_order(plan):
    batches = Prefetcher(plan, lambda ids: ids, rank=0, first=4)  # type: ignore[arg-type, return-value]
    with pytest.raises(AssertionError, match="step 6 instead of 4"):
        next(batches.of_step(6))
    batches.close()
