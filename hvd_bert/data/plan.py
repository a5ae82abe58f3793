"""The batch plan: which windows a step trains on, and which rank takes which of them.

A pure function of (seed, epoch, world size): nothing is kept or replayed. The windows of a step depend on the global
batch only, so worlds of different size that share a global batch train on the same windows step by step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hvd_bert.errors import UserError

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class BatchPlan:
    """`num_windows` dealt out over `size` ranks: `global_batch` a step, over all ranks and `accumulation` passes."""

    num_windows: int
    global_batch: int
    accumulation: int
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_windows < self.size:
            raise UserError(
                f"The training data gives {self.num_windows} windows, fewer than the {self.size} ranks: use fewer ranks"
                " or more data."
            )

    @classmethod
    def of_rank_batch(cls, num_windows: int, rank_batch: int, accumulation: int, size: int, seed: int) -> BatchPlan:
        """The plan in which a rank takes `rank_batch` windows in each of a step's `accumulation` passes."""
        return cls(num_windows, rank_batch * accumulation * size, accumulation, size, seed)

    def with_global_batch(self, global_batch: int) -> BatchPlan:
        """The same windows in steps of `global_batch`; passes of at most today's size, as many as that takes."""
        rank_batch = self.global_batch // (self.size * self.accumulation)
        passes = math.ceil(global_batch / (self.size * rank_batch))
        return replace(self, global_batch=global_batch, accumulation=passes)

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
        of them may hold fewer windows, or none.
        """
        return np.array_split(self.step_windows(step)[rank :: self.size], self.accumulation)


@lru_cache(maxsize=2)
def _epoch_order(num_windows: int, seed: int, epoch: int) -> Ids:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_windows)
    order.setflags(write=False)  # shared by all who ask
    return order
