"""Balanced partition: splits items of different cost into parts of equal size and nearly equal cost.

Costs are whole numbers, so that all hosts compute the same partition: floating-point sums may differ in the last bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

_CANDIDATES = 32  # items per part to try for a swap; larger parts are nearly even without swaps


def window_costs(lengths: ArrayLike, crossover: int) -> Ints:
    """The cost of windows of n tokens: n * (crossover + n), the encoder's FLOP in units of attention's per pair.

    `crossover`: the length at which attention costs as much as the rest of the encoder (`model.flops.ForwardFlops`).
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    return tokens * (crossover + tokens)


def balanced_partition(costs: Ints, parts: int) -> list[Ints]:
    """Split the indices of `costs` into `parts` sorted lists of equal length and nearly equal cost.

    Lengths differ by at most one; the first lists are the longer ones. The items are first assigned in snake order,
    the most expensive first. Then the most loaded part swaps one item with the least loaded part, the second most
    loaded with the second least loaded, and so on, so that each pair's costs become as close as possible. This
    repeats until no swap helps. Ties are broken by index, so the result is deterministic.
    """
    order = np.argsort(-costs, kind="stable")
    members = _snake(order, parts)  # [parts, size of the largest part], -1: empty slot
    empty = members < 0
    member_costs = np.where(empty, 0, costs[members])
    half, stride = parts // 2, -(-members.shape[1] // _CANDIDATES)
    while half and members.size:
        totals = member_costs.sum(axis=1)
        ranking = np.argsort(-totals, kind="stable")
        most_loaded, least_loaded = ranking[:half], ranking[::-1][:half]
        gap = totals[most_loaded] - totals[least_loaded]
        # [pairs, candidates of the most loaded part, candidates of the least loaded part]
        moved_cost = member_costs[most_loaded, ::stride, None] - member_costs[least_loaded, None, ::stride]
        new_gap = np.abs(gap[:, None, None] - 2 * moved_cost)
        # Swapping with an empty slot would change the part sizes.
        new_gap[empty[most_loaded, ::stride, None] | empty[least_loaded, None, ::stride]] = np.iinfo(np.int64).max
        new_gap = new_gap.reshape(half, -1)
        best = new_gap.argmin(axis=1)
        swapping = np.flatnonzero(new_gap[np.arange(half), best] < gap)  # the pairs whose best swap helps
        if not len(swapping):  # the loop ends: each swap lowers the sum of the squared totals
            break
        candidates = -(-members.shape[1] // stride)
        given, taken = (stride * candidate for candidate in np.divmod(best[swapping], candidates))
        in_most, in_least = (most_loaded[swapping], given), (least_loaded[swapping], taken)
        for table in (members, member_costs):
            table[in_most], table[in_least] = table[in_least], table[in_most]
    members.sort(axis=1)
    return [row[row >= 0] for row in members]


def _snake(order: Ints, parts: int) -> Ints:
    """Assign `order` to the parts from first to last, then back, and so on; the remainder goes to the first parts."""
    rows = -(-len(order) // parts)
    table = np.full((rows, parts), -1, dtype=np.int64)
    table.flat[: len(order)] = order
    full = table[: len(order) // parts]
    full[1::2] = full[1::2, ::-1].copy()
    return np.ascontiguousarray(table.T)
