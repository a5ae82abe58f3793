"""The batch plan: which windows a step trains on, and which rank takes which of them.

A pure function of (seed, epoch, world size): nothing is kept or replayed. The windows of a step depend on the global
batch only, so worlds of different size that share a global batch train on the same windows step by step. Who takes
which is dealt anew in each step: as many windows for each rank, and as nearly as may be the same cost, since in every
step all wait for the slowest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hvd_bert.data.balance import balanced_partition, window_costs
from hvd_bert.errors import UserError

Ids = NDArray[np.int64]
Lengths = NDArray[np.int32]


@dataclass(frozen=True, eq=False)  # equal to itself alone, so that caches can hold it
class BatchPlan:
    """Windows dealt out over `size` ranks: `global_batch` a step, over all ranks and `accumulation` passes.

    `lengths`: tokens of each window, the same on all ranks; `crossover`: the length at which a window's attention costs
    as much as all else (`balance.crossover`).
    """

    lengths: Lengths
    global_batch: int
    accumulation: int
    size: int
    seed: int
    crossover: int

    def __post_init__(self) -> None:
        if self.num_windows < self.size:
            raise UserError(
                f"The training data gives {self.num_windows} windows, fewer than the {self.size} ranks: use fewer ranks"
                " or more data."
            )

    @classmethod
    def of_rank_batch(
        cls, lengths: Lengths, rank_batch: int, accumulation: int, size: int, seed: int, crossover: int
    ) -> BatchPlan:
        """The plan in which a rank takes `rank_batch` windows in each of a step's `accumulation` passes."""
        return cls(lengths, rank_batch * accumulation * size, accumulation, size, seed, crossover)

    def with_global_batch(self, global_batch: int) -> BatchPlan:
        """The same windows in steps of `global_batch`; passes of at most today's size, as many as that takes."""
        rank_batch = self.global_batch // (self.size * self.accumulation)
        passes = math.ceil(global_batch / (self.size * rank_batch))
        return replace(self, global_batch=global_batch, accumulation=passes)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return len(self.lengths)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every window comes once; the last may be smaller."""
        return math.ceil(self.num_windows / self.global_batch)

    def step_windows(self, step: int) -> Ids:
        """Ids of the windows of optimizer step `step` (0, 1, ... across epochs), of all ranks."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.global_batch
        return _epoch_order(self.num_windows, self.seed, epoch)[first : first + self.global_batch]

    def rank_windows(self, step: int, rank: int) -> list[Ids]:
        """Ids of the windows that `rank` takes in each of the step's `accumulation` passes.

        Every rank makes the same number of passes (or the others would wait for ever); in an epoch's last step some
        of them may hold fewer windows, or none. The ranks' totals are made even first, since the ranks wait for each
        other once a step; then each rank's passes, since the largest needs the most memory.
        """
        ids = _shares(self, step)[rank]
        return [ids[places] for places in balanced_partition(self._costs(ids), self.accumulation)]

    def rank_tokens(self, step: int) -> Ids:
        """Tokens that each rank takes in a step, [size]."""
        return np.array([self.lengths[ids].sum(dtype=np.int64) for ids in _shares(self, step)])

    def imbalance(self, step: int) -> float:
        """The most tokens of a rank in a step over the mean of the ranks."""
        if self.size == 1:
            return 1.0
        tokens = self.rank_tokens(step)
        return float(tokens.max() * self.size / tokens.sum())

    def rank_costs(self, step: int) -> Ids:
        """The same with attention counted in: what is made even."""
        return np.array([self._costs(ids).sum() for ids in _shares(self, step)])

    def _costs(self, ids: Ids) -> Ids:
        return window_costs(self.lengths[ids], self.crossover)


@lru_cache(maxsize=8)  # batches are made ahead of the steps that are counted
def _shares(plan: BatchPlan, step: int) -> list[Ids]:
    """The windows of each rank, in the step's order."""
    windows = plan.step_windows(step)
    return [windows[places] for places in balanced_partition(plan._costs(windows), plan.size)]


@lru_cache(maxsize=2)
def _epoch_order(num_windows: int, seed: int, epoch: int) -> Ids:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_windows)
    order.setflags(write=False)  # shared by all who ask
    return order
