"""The batch plan: every window once per epoch, the same steps whatever the world size."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_bert.data.plan import BatchPlan
from hvd_bert.errors import UserError

quick = settings(max_examples=60, deadline=None)


@st.composite
def plans(draw):
    size = draw(st.integers(1, 9))
    return BatchPlan.of_rank_batch(
        num_windows=draw(st.integers(size, 200)),
        rank_batch=draw(st.integers(1, 8)),
        accumulation=draw(st.integers(1, 4)),
        size=size,
        seed=draw(st.integers(0, 2**32)),
    )


def by_rank(plan: BatchPlan, step: int) -> list[list[np.ndarray]]:
    return [plan.rank_windows(step, rank) for rank in range(plan.size)]


@quick
@given(plans(), st.integers(0, 3))
def test_each_window_once_per_epoch(plan, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    taken = [ids for step in steps for passes in by_rank(plan, step) for ids in passes]
    assert sorted(chain.from_iterable(ids.tolist() for ids in taken)) == list(range(plan.num_windows))


@quick
@given(plans(), st.integers(0, 50))
def test_ranks_share_a_step_evenly(plan, step):
    ranks = by_rank(plan, step)
    assert {len(passes) for passes in ranks} == {plan.accumulation}  # or some would wait for ever
    sizes = [sum(map(len, passes)) for passes in ranks]
    assert max(sizes) - min(sizes) <= 1
    each = [len(ids) for passes in ranks for ids in passes]
    assert max(each) - min(each) <= 1
    assert max(each) <= math.ceil(plan.global_batch / plan.size / plan.accumulation)
    taken = [int(i) for passes in ranks for ids in passes for i in ids]
    assert len(taken) == len(set(taken))
    assert set(taken) == set(plan.step_windows(step).tolist())
    assert taken  # no step without windows


@quick
@given(plans(), st.integers(0, 50))
def test_every_step_but_an_epochs_last_is_full(plan, step):
    last = step % plan.steps_per_epoch == plan.steps_per_epoch - 1
    rest = plan.num_windows - (plan.steps_per_epoch - 1) * plan.global_batch
    assert len(plan.step_windows(step)) == (rest if last else plan.global_batch)


@pytest.mark.parametrize("num_windows", [8, 24, 101])
@pytest.mark.parametrize("step", [0, 2, 7, 40])
def test_step_does_not_depend_on_the_world(num_windows, step):
    worlds = [(8, 1, 1), (4, 1, 2), (2, 2, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8)]
    plans = [BatchPlan.of_rank_batch(num_windows, batch, passes, size, seed=3) for batch, passes, size in worlds]
    for plan in plans:
        assert plan.global_batch == 8
        np.testing.assert_array_equal(plan.step_windows(step), plans[0].step_windows(step))


@quick
@given(plans(), st.integers(0, 50))
def test_plan_is_pure(plan, step):
    again = BatchPlan(plan.num_windows, plan.global_batch, plan.accumulation, plan.size, plan.seed)
    before = plan.step_windows(step).copy()
    for other in (0, step + plan.steps_per_epoch, step + 3 * plan.steps_per_epoch):
        again.rank_windows(other, 0)  # what was asked for in between does not matter
    np.testing.assert_array_equal(again.step_windows(step), before)


def test_no_caller_can_change_the_order():
    plan = BatchPlan(num_windows=10, global_batch=4, accumulation=1, size=1, seed=0)
    with pytest.raises(ValueError, match="read-only"):
        plan.step_windows(0)[0] = 1


def test_epochs_and_seeds_differ():
    orders = [
        BatchPlan(50, 50, 1, 1, seed).step_windows(epoch).tolist() for seed in range(3) for epoch in range(3)
    ]  # one step per epoch
    assert len({tuple(order) for order in orders}) == 9
    assert list(range(50)) not in orders


@pytest.mark.parametrize(("num_windows", "size"), [(0, 1), (3, 4), (1, 2)])
def test_fewer_windows_than_ranks_are_refused(num_windows, size):
    with pytest.raises(UserError, match=rf"{num_windows} windows, fewer than the {size} ranks"):
        BatchPlan(num_windows, size, 1, size, 0)
    BatchPlan(size, size, 1, size, 0)
