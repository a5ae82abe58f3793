"""Balanced partition: each item is in one part, sizes differ by at most 1, and costs are as even as swaps make them."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hvd_bert.data.batch_plan import balanced_partition, window_costs

quick = settings(max_examples=100)
cost_arrays = st.lists(st.integers(0, 10**7), max_size=120).map(lambda costs: np.array(costs, dtype=np.int64))


def totals(costs: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.array([costs[part].sum() for part in parts])


@quick
@given(cost_arrays, st.integers(1, 20))
def test_each_item_once_and_parts_of_equal_size(costs, parts):
    partition = balanced_partition(costs, parts)
    assert sorted(np.concatenate(partition).tolist()) == list(range(len(costs)))
    assert [len(part) for part in partition] == [len(costs[i::parts]) for i in range(parts)]
    assert all(np.all(np.diff(part) > 0) for part in partition)


@quick
@given(cost_arrays, st.integers(2, 20))
@example(np.arange(64) ** 3, 2)
def test_no_swap_of_the_most_with_the_least_loaded_part_helps(costs, parts):
    assume(len(costs) <= 32 * parts)  # in larger parts, not every swap is tried
    partition = balanced_partition(costs, parts)
    ranking = np.argsort(-totals(costs, partition), kind="stable")
    most_loaded, least_loaded = partition[ranking[0]], partition[ranking[-1]]
    gap = costs[most_loaded].sum() - costs[least_loaded].sum()
    moved = costs[most_loaded][:, None] - costs[least_loaded]
    assert not np.any(np.abs(gap - 2 * moved) < gap)


def test_ties_are_broken_by_index():
    """Ranks must agree, but numpy's default sort orders equal values differently on different processors."""
    costs = np.array([7, 9] * 100)
    order = sorted(range(200), key=lambda item: -costs[item])
    first, second = balanced_partition(costs, 2)
    assert first.tolist() == sorted(order[0::4] + order[3::4])
    assert second.tolist() == sorted(order[1::4] + order[2::4])


def test_partition_stays_the_same():
    """Pin the partition: in a resumed run, each rank must get the same windows as before."""
    lengths = [383, 112, 240, 57, 301, 112, 99, 384, 204, 181, 77, 266, 143, 340, 95, 60, 228]
    expected = [[1, 7, 14, 15], [0, 3, 5, 10], [6, 8, 13], [4, 12, 16], [2, 9, 11]]
    assert [part.tolist() for part in balanced_partition(np.array(lengths) ** 2, 5)] == expected


def test_large_parts_are_even_although_not_all_swaps_are_tried():
    costs = np.random.default_rng(0).integers(40, 384, 8003)
    partition = totals(costs, balanced_partition(costs, 8))
    assert partition.max() <= 1.001 * partition.mean()


def test_cost_is_the_layers_flop():
    tokens, hidden, intermediate = 179, 768, 3072
    weights = 4 * hidden**2 + 2 * hidden * intermediate  # query, key, value and output; feed-forward
    flop = 2 * tokens * weights + 2 * 2 * tokens**2 * hidden  # plus attention's scores and weighted sum
    assert 4 * hidden * int(window_costs([tokens], 4608)[0]) == flop
