"""The batch plan: every window occurs once per epoch, and a step has the same windows for every world size."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.data.batch_plan import BatchPlan, mix
from hvd_bert.tasks.base import make_plan

MINILM, BERT_BASE = 2304, 4608  # tokens at which attention costs as much as the rest of a layer
quick = settings(max_examples=60)


@st.composite
def plans(draw):
    size, accumulation = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return BatchPlan(
        lengths=lengths(draw(st.integers(size, 200)), seed=draw(st.integers(0, 2**32))),
        global_batch=draw(st.integers(1, 8)) * accumulation * size,
        accumulation=accumulation,
        size=size,
        seed=draw(st.integers(0, 2**32)),
        crossover=draw(st.sampled_from([1, MINILM, BERT_BASE, 10**9])),
    )


def lengths(num_windows: int, seed: int = 0) -> np.ndarray:
    """Draw window lengths like SQuAD's, in tokens: at least 40, 179 on average, truncated at 384."""
    drawn = np.random.default_rng(seed).gamma(5.0, 28.0, num_windows)
    return np.minimum(40 + drawn, 384).astype(np.int32)


def by_rank(plan: BatchPlan, step: int) -> list[list[np.ndarray]]:
    return [plan.rank_windows(step, rank) for rank in range(plan.size)]


def rank_costs(plan: BatchPlan, step: int) -> np.ndarray:
    """Return the plan's estimate of a step's cost per rank, [size]. It includes attention."""
    taken = [plan.lengths[np.concatenate(batches)].astype(np.int64) for batches in by_rank(plan, step)]
    return np.array([(tokens * (plan.crossover + tokens)).sum() for tokens in taken])


def imbalance(totals: np.ndarray) -> float:
    """Return the largest total divided by the mean."""
    return float(totals.max() / totals.mean())


@quick
@given(plans(), st.integers(0, 3))
def test_each_window_once_per_epoch_in_full_steps(plan, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    taken = [[ids for batches in by_rank(plan, step) for ids in batches] for step in steps]
    assert sorted(i for parts in taken for ids in parts for i in ids.tolist()) == list(range(plan.num_windows))
    assert {sum(map(len, parts)) for parts in taken[:-1]} <= {plan.global_batch}
    assert sum(map(len, taken[-1]))  # no step without windows


@quick
@given(plans(), st.integers(0, 50))
def test_ranks_share_a_step_evenly(plan, step):
    ranks = by_rank(plan, step)
    assert {len(batches) for batches in ranks} == {plan.accumulation}  # with fewer on a rank, the others would hang
    sizes = [sum(map(len, batches)) for batches in ranks]
    assert max(sizes) - min(sizes) <= 1
    each = [len(ids) for batches in ranks for ids in batches]
    assert max(each) - min(each) <= 1
    assert max(each) <= math.ceil(plan.global_batch / plan.size / plan.accumulation)
    taken = [np.concatenate(batches) for batches in ranks]
    assert sorted(np.concatenate(taken)) == sorted(plan.step_windows(step))
    assert plan.rank_tokens(step).tolist() == [plan.lengths[ids].sum() for ids in taken]
    costs, tokens = rank_costs(plan, step), plan.lengths[plan.step_windows(step)].astype(np.int64)
    most_expensive = int((tokens * (plan.crossover + tokens)).max())
    for size in set(sizes):  # a rank with fewer windows may cost less
        assert np.ptp(costs[np.array(sizes) == size]) <= most_expensive


@pytest.mark.parametrize("num_windows", [8, 24, 101])
@pytest.mark.parametrize("step", [0, 2, 7, 40])
def test_step_does_not_depend_on_the_world(num_windows, step):
    worlds = [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (1, 8)]  # (accumulation, world size)
    plans = [BatchPlan(lengths(num_windows), 8, *world, seed=3, crossover=MINILM) for world in worlds]
    for plan in plans:
        np.testing.assert_array_equal(plan.step_windows(step), plans[0].step_windows(step))


@quick
@given(plans(), st.integers(0, 50))
def test_plan_is_pure(plan, step):
    again = replace(plan, lengths=plan.lengths.copy())
    assigned = [ids.tolist() for batches in by_rank(plan, step) for ids in batches]
    for other in (0, step + plan.steps_per_epoch):
        again.rank_windows(other, 0)  # calls for other steps must not change the result
    assert [ids.tolist() for batches in by_rank(again, step) for ids in batches] == assigned


@pytest.mark.parametrize("crossover", [MINILM, BERT_BASE])
@pytest.mark.parametrize(
    ("size", "batch", "accumulation"),
    [(2, 8, 1), (4, 8, 1), (8, 8, 1), (3, 8, 1), (4, 16, 1), (128, 8, 1), (4, 32, 4)],
)
def test_ranks_and_micro_batches_have_nearly_the_same_number_of_tokens(size, batch, accumulation, crossover):
    plan = BatchPlan(lengths(40 * size * batch), batch * size, accumulation, size, 0, crossover)
    for step in range(plan.steps_per_epoch):
        assert imbalance(plan.rank_tokens(step)) <= 1.02
        assert imbalance(rank_costs(plan, step)) <= 1.02
        for batches in by_rank(plan, step):
            assert imbalance(np.array([plan.lengths[ids].sum() for ids in batches])) <= 1.03


def test_epochs_and_seeds_differ():
    orders = [
        BatchPlan(lengths(50), 50, 1, 1, seed, MINILM).step_windows(epoch).tolist()
        for seed in range(3)
        for epoch in range(3)
    ]  # each epoch is one step
    assert len({tuple(order) for order in orders}) == 9
    assert list(range(50)) not in orders


def test_order_stays_the_same():
    """Pin the order, which a resumed run must repeat. Equal mixture weights give the same order as no mixture."""
    assert not mix((2, 4), (1, 1))
    for weights, epoch_1 in (((1, 1), [1, 2, 0, 4, 5, 3]), ((0.5, 1.5), [3, 2, 4, 1, 4, 5, 3])):
        plan = BatchPlan(lengths(6), 7, 1, 1, seed=3, crossover=1, mixture=mix((2, 4), weights))
        assert plan.step_windows(1).tolist() == epoch_1


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 0.5), (0.3, 2.5, 1), (0.001, 1, 0.1)])
def test_each_window_once_before_any_twice(weights):
    sizes = (7, 20, 31)
    mixture = mix(sizes, weights)
    plan = BatchPlan(lengths(sum(sizes)), 8, 1, 2, seed=3, crossover=1, mixture=mixture)
    assert plan.num_windows == sum(max(1, round(n * weight)) for n, weight in zip(sizes, weights, strict=True))
    counts = np.zeros(sum(sizes), int)
    for epoch in range(12):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        taken = np.concatenate([plan.step_windows(step) for step in steps])
        counts += np.bincount(taken, minlength=sum(sizes))
        by_file = np.split(counts, np.cumsum(sizes)[:-1])
        for (size, each_epoch), found in zip(mixture or [(n, n) for n in sizes], by_file, strict=True):
            assert found.sum() == each_epoch * (epoch + 1) and found.max() - found.min() <= 1, size


@pytest.mark.parametrize(("num_windows", "size"), [(0, 1), (3, 4), (1, 2)])
def test_fewer_windows_than_ranks_are_refused(num_windows, size):
    with refused(f"{num_windows} windows", f"{size} ranks"):
        BatchPlan(lengths(num_windows), size, 1, size, 0, MINILM)
    BatchPlan(lengths(size), size, 1, size, 0, MINILM)


@pytest.mark.parametrize(
    ("size", "accumulation", "before", "after", "batches"),
    [(3, 1, 8, 16, 3), (2, 2, 12, 24, 4), (4, 1, 8, 4, 1), (1, 2, 16, 17, 3)],
)
def test_another_global_batch_never_takes_larger_micro_batches(size, accumulation, before, after, batches):
    plan = BatchPlan(lengths(50), before, accumulation, size, 0, MINILM)
    changed = plan.with_global_batch(after)
    assert (changed.global_batch, changed.accumulation, changed.total_micro_batches) == (after, batches, size * batches)


# The global batch that flags give for different world sizes

LENGTHS = np.full(1000, 150, np.int32)


def plan_on(size: int, *flags: str) -> BatchPlan:
    return make_plan(LENGTHS, parse(list(flags)).train, 4608, make_world(size=size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 32])
def test_global_batch_is_the_same_on_any_number_of_ranks(size):
    plan = plan_on(size, "--global_batch", "32", "--per_device_train_batch_size", "8")
    taken = [[len(ids) for ids in plan.rank_windows(0, rank)] for rank in range(size)]
    assert sum(map(sum, taken)) == plan.global_batch == 32
    assert max(map(max, taken)) <= 8 and all(map(sum, taken))
    assert len({len(batches) for batches in taken}) == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--global_batch 3", ["--global_batch 3", "4 devices"]),
        (
            "--global_batch 32 --gradient_accumulation_steps 2",
            ["--gradient_accumulation_steps 2", "--global_batch 32", "8 windows"],
        ),
        ("--global_batch 0", ["--global_batch 0"]),
    ],
)
def test_global_batch_that_does_not_fit_is_refused(flags, named):
    with refused(*named):
        plan_on(4, *flags.split())
