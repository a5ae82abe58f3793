"""The batch plan: which windows a step trains on, and which rank takes which of them.

Which windows a step takes depends only on the seed, the step and the global batch; which rank takes them, also on the
world size. So a resume replays nothing, and worlds of different size with the same global batch train on the same
windows in each step. Each step's windows are balanced over the ranks, since all ranks wait for the slowest one: the
numbers of windows differ by at most one, and the costs are nearly equal.
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


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, for lru_cache
class BatchPlan:
    """Assigns windows to `size` ranks: `global_batch` per step, over all ranks and `accumulation` micro-batches.

    `lengths`: tokens per window, the same on all ranks. `crossover`: see `balance.window_costs`.
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
                f"The training data has {self.num_windows} windows, fewer than the {self.size} ranks. Use fewer ranks"
                " or more data."
            )

    @classmethod
    def of_rank_batch(
        cls, lengths: Lengths, rank_batch: int, accumulation: int, size: int, seed: int, crossover: int
    ) -> BatchPlan:
        """The plan with `rank_batch` windows per rank in each of a step's `accumulation` micro-batches."""
        return cls(lengths, rank_batch * accumulation * size, accumulation, size, seed, crossover)

    def with_global_batch(self, global_batch: int) -> BatchPlan:
        """The plan with another `global_batch`, with enough micro-batches that none is larger than now."""
        rank_batch = self.global_batch // (self.size * self.accumulation)
        passes = math.ceil(global_batch / (self.size * rank_batch))
        return replace(self, global_batch=global_batch, accumulation=passes)

    @property
    def num_windows(self) -> int:
        """Windows per epoch."""
        return len(self.lengths)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last one may be smaller."""
        return math.ceil(self.num_windows / self.global_batch)

    @property
    def passes(self) -> int:
        """Micro-batches per step over all ranks."""
        return self.size * self.accumulation

    def step_windows(self, step: int) -> Ids:
        """Ids of the windows of optimizer step `step` (0, 1, ... across epochs), over all ranks."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.global_batch
        return _epoch_order(self.num_windows, self.seed, epoch)[first : first + self.global_batch]

    def rank_windows(self, step: int, rank: int) -> list[Ids]:
        """Ids of the windows that `rank` takes in each of the step's `accumulation` micro-batches.

        All ranks have the same number of micro-batches: a rank with fewer would leave the others waiting forever. In an
        epoch's last step, some micro-batches have fewer windows or none. The ranks' totals are balanced first, since
        ranks wait for each other once per step. Each rank's micro-batches are balanced next, since the largest needs
        the most memory.
        """
        ids = _shares(self, step)[rank]
        return [ids[part] for part in balanced_partition(self._costs(ids), self.accumulation)]

    def rank_tokens(self, step: int) -> Ids:
        """Tokens per rank in a step, [size]."""
        return np.array([self.lengths[ids].sum(dtype=np.int64) for ids in _shares(self, step)])

    def imbalance(self, step: int) -> float:
        """Tokens of the most loaded rank in a step, divided by the mean over the ranks."""
        if self.size == 1:
            return 1.0
        tokens = self.rank_tokens(step)
        return float(tokens.max() * self.size / tokens.sum())

    def _costs(self, ids: Ids) -> Ids:
        return window_costs(self.lengths[ids], self.crossover)


@lru_cache(maxsize=8)  # several steps: batches are prefetched
def _shares(plan: BatchPlan, step: int) -> list[Ids]:
    """The windows of each rank, in the step's order."""
    windows = plan.step_windows(step)
    return [windows[part] for part in balanced_partition(plan._costs(windows), plan.size)]


@lru_cache(maxsize=2)
def _epoch_order(num_windows: int, seed: int, epoch: int) -> Ids:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_windows)
    order.setflags(write=False)  # all callers share the cached array
    return order
