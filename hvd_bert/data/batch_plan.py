"""The batch plan: the windows of each step, and each rank's share of them.

A step's windows depend only on the data, the seed, the step and the global batch. A rank's share also depends on the
world size. So a resumed run need not replay earlier steps, and runs with different world sizes but the same global
batch train on the same windows in each step. Shares are balanced, since all ranks wait for the slowest rank: the ranks'
window counts differ by at most one, and their costs are nearly equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvd_bert.errors import UserError

Ids = NDArray[np.int64]
Lengths = NDArray[np.int32]
Mixture = tuple[tuple[int, int], ...]  # per data file: (number of windows, windows used per epoch)
_CANDIDATES = 32  # maximum items per part tried as swaps: every n-th of a larger part, which is nearly balanced anyway


@dataclass(frozen=True, eq=False)  # eq=False: hashed by identity, so that lru_cache accepts plans
class BatchPlan:
    """Assigns `global_batch` windows per step to `size` ranks with `accumulation` micro-batches each.

    `lengths`: tokens per window. `crossover`: see `window_costs`. `mixture`: empty if an epoch uses each window once.
    """

    lengths: Lengths
    global_batch: int
    accumulation: int
    size: int
    seed: int
    crossover: int
    mixture: Mixture = ()

    def __post_init__(self) -> None:
        if self.num_windows < self.size:
            raise UserError(
                f"The training data has {self.num_windows} windows, fewer than the {self.size} ranks. Use fewer ranks"
                " or more data."
            )

    def with_global_batch(self, global_batch: int) -> BatchPlan:
        """Copy the plan with another `global_batch`, and the fewest micro-batches that are no larger than before."""
        rank_batch = self.global_batch // (self.size * self.accumulation)
        accumulation = math.ceil(global_batch / (self.size * rank_batch))
        return replace(self, global_batch=global_batch, accumulation=accumulation)

    @property
    def num_windows(self) -> int:
        """Windows per epoch."""
        return sum(taken for _, taken in self.mixture) if self.mixture else len(self.lengths)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch. The last step of an epoch may have fewer windows."""
        return math.ceil(self.num_windows / self.global_batch)

    @property
    def total_micro_batches(self) -> int:
        """Micro-batches per step over all ranks."""
        return self.size * self.accumulation

    def step_windows(self, step: int) -> Ids:
        """Return the ids of all ranks' windows in optimizer step `step`, counted from 0 across epochs."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.global_batch
        mixture = self.mixture or ((self.num_windows, self.num_windows),)
        return _epoch_order(mixture, self.seed, epoch)[first : first + self.global_batch]

    def rank_windows(self, step: int, rank: int) -> list[Ids]:
        """Return the ids of the rank's windows for each of the step's `accumulation` micro-batches.

        All ranks have the same number of micro-batches, since otherwise some ranks would wait forever. In an epoch's
        last step, some micro-batches may be empty. The ranks' totals are balanced first, since ranks wait for each
        other once per step. Each rank's micro-batches are balanced next, since the largest needs the most memory.
        """
        ids = _shares(self, step)[rank]
        costs = window_costs(self.lengths[ids], self.crossover)
        return [ids[part] for part in balanced_partition(costs, self.accumulation)]

    def rank_tokens(self, step: int) -> Ids:
        """Return the number of tokens per rank in a step, int64 [size]."""
        return np.array([self.lengths[ids].sum(dtype=np.int64) for ids in _shares(self, step)])

    def imbalance(self, step: int) -> float:
        """Return the largest number of tokens per rank in a step, divided by the mean over the ranks."""
        tokens = self.rank_tokens(step)
        return float(tokens.max() * self.size / tokens.sum())


class HeaviestFirst(BatchPlan):
    """A plan for --fast_dev_run: step 0 uses the windows of the first epoch's largest step, to reach peak memory."""

    def step_windows(self, step: int) -> Ids:
        return super().step_windows(step or self._heaviest)

    @cached_property
    def _heaviest(self) -> int:
        steps = range(self.steps_per_epoch)
        return max(steps, key=lambda step: self.lengths[BatchPlan.step_windows(self, step)].sum(dtype=np.int64))


@lru_cache(maxsize=8)  # several steps, since batches are prefetched
def _shares(plan: BatchPlan, step: int) -> list[Ids]:
    """Return the ids of each rank's windows, in the step's order."""
    windows = plan.step_windows(step)
    costs = window_costs(plan.lengths[windows], plan.crossover)
    return [windows[part] for part in balanced_partition(costs, plan.size)]


@lru_cache(maxsize=2)
def _epoch_order(mixture: Mixture, seed: int, epoch: int) -> Ids:
    chosen, first = [], 0
    for file, (windows, taken) in enumerate(mixture):
        # A file's windows are used in shuffled rounds, each window once per round. Rounds continue across epochs.
        begin = epoch * taken
        rounds = range(begin // windows, -(-(begin + taken) // windows))
        series = np.concatenate([_shuffled(windows, seed, file, number + 1) for number in rounds])
        begin -= rounds[0] * windows
        chosen.append(first + np.sort(series[begin : begin + taken]))
        first += windows
    order = np.concatenate(chosen)[_shuffled(sum(map(len, chosen)), seed, epoch)]
    order.setflags(write=False)  # all callers share the cached array
    return order


def _shuffled(count: int, *seeds: int) -> Ids:
    return np.random.Generator(np.random.PCG64(seeds)).permutation(count)


def mix(windows: Sequence[int], weights: Sequence[float]) -> Mixture:
    """Return `BatchPlan.mixture` for files with these numbers of windows; empty if all weights are 1.

    With weight 2, an epoch uses each window of the file twice.
    """
    mixture = tuple((n, max(1, round(weight * n))) for n, weight in zip(windows, weights, strict=True))
    return () if all(weight == 1 for weight in weights) else mixture


def window_costs(lengths: ArrayLike, crossover: int) -> Ids:
    """Return n * (crossover + n) for windows of n tokens: the encoder's FLOP / attention's FLOP per pair of tokens.

    `crossover`: the window length at which attention costs as much as the rest of the encoder
    (`model.flops.ForwardFlops`).
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    return tokens * (crossover + tokens)


def balanced_partition(costs: Ids, parts: int) -> list[Ids]:
    """Split the indices of `costs` into `parts` sorted lists of equal length and nearly equal cost.

    Costs are integers, so that all hosts compute the same result: sums of floats may differ in the last bits.

    List lengths differ by at most one, and the longer lists come first. Items are first assigned in snake order, the
    most expensive first. Then the most loaded part swaps one item with the least loaded part, the second most loaded
    with the second least loaded, and so on, so that each pair's costs become as close as possible. This repeats until
    no swap helps. Ties are broken by index, so the result is deterministic.
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
        swapping = np.flatnonzero(new_gap[np.arange(half), best] < gap)  # pairs whose best swap reduces the gap
        if not len(swapping):  # always reached, since each swap lowers the sum of squared totals
            break
        candidates = -(-members.shape[1] // stride)
        given, taken = (stride * candidate for candidate in np.divmod(best[swapping], candidates))
        in_most, in_least = (most_loaded[swapping], given), (least_loaded[swapping], taken)
        for table in (members, member_costs):
            table[in_most], table[in_least] = table[in_least], table[in_most]
    members.sort(axis=1)
    return [row[row >= 0] for row in members]


def _snake(order: Ids, parts: int) -> Ids:
    """Deal out the items of `order` to parts 0 ... n-1, then n-1 ... 0, and so on.

    The remainder goes to the first parts. Returns [parts, size of the largest part], with -1 in empty slots.
    """
    rows = -(-len(order) // parts)
    table = np.full((rows, parts), -1, dtype=np.int64)
    table.flat[: len(order)] = order
    full = table[: len(order) // parts]
    full[1::2] = full[1::2, ::-1].copy()
    return np.ascontiguousarray(table.T)
