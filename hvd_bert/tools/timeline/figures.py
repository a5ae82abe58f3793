"""The data classes of a timeline's figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hvd_bert.monitoring.profiling.byte_parser import Array
from hvd_bert.tools.timeline.steps import StepTable


class Spread:
    """Sum and quantiles of integers, accurate to 1 %, in a table of fixed size."""

    FINE = 64  # bins per factor of 2; one bin per number below FINE

    def __init__(self) -> None:
        self.bins = np.zeros(self.FINE * 60, np.int64)
        self.total, self.maximum = 0, 0

    def add(self, values: Array) -> None:
        """Add numbers. Negative ones count as 0."""
        if not len(values):
            return
        values = np.maximum(values, 0)
        above = np.maximum(values, self.FINE) / self.FINE
        bins = np.where(values < self.FINE, values, self.FINE * (1 + np.log2(above))).astype(np.int64)
        self.bins += np.bincount(bins, minlength=len(self.bins))
        self.total += int(values.sum())
        self.maximum = max(self.maximum, int(values.max()))

    @property
    def count(self) -> int:
        """Number of values."""
        return int(self.bins.sum())

    def quantile(self, part: float) -> float:
        """A quantile; NaN if there are no values."""
        if not self.count:
            return math.nan
        at = int(np.searchsorted(np.cumsum(self.bins), part * self.count, side="left"))
        middle = float(at) if at < self.FINE else self.FINE * 2 ** ((at + 0.5) / self.FINE - 1)
        return min(middle, float(self.maximum))


@dataclass(frozen=True)
class Phase:
    """`count`: of tensors for negotiations, else of messages. `total_s`: time with at least one in this phase."""

    name: str
    kind: str
    count: int
    total_s: float
    share: float
    median_s: float
    p99_s: float


@dataclass(frozen=True)
class SlowTensor:
    """Mean times of a tensor's operations: negotiation until all ranks are ready, then copies and collective."""

    name: str
    count: int
    size: int | None
    negotiation_s: float
    operation_s: float
    longest_s: float


@dataclass(frozen=True)
class SizeClass:
    """Allreduces of up to `up_to` bytes (None: larger). Bandwidth: their bytes over the time of the collective."""

    up_to: int | None
    messages: int
    tensors: int
    size: int
    median_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class RankRow:
    """`last`: negotiations in which this rank was last by more than 2 ms. `share`: of the negotiations that name ranks.
    `steps`: the same for steps, out of `of_steps`. `waited_s`: total time that ranks waited for it in these steps."""

    rank: int
    last: int
    share: float
    median_s: float
    p99_s: float
    steps: int
    of_steps: int
    step_median_s: float
    waited_s: float


@dataclass(frozen=True)
class StepFigures:
    """Figures of the steps after the first. Seconds are medians, `least` and `most` bounds, shares of `step_s`."""

    steps: int
    step_s: float
    p99_s: float
    busy_s: float
    exposed_least_s: float
    exposed_most_s: float
    exposed_p99_s: float
    hidden_share: float
    exposed_least_share: float
    exposed_most_share: float
    wait_s: float
    wait_p99_s: float
    wait_share: float
    messages: float
    size: float


@dataclass
class Findings:
    """All findings of a file. `ranks`: number of ranks, None if unknown. `hosts`: as given.

    Bandwidths: `bytes_per_s` of large messages; `wire_bytes_per_s` that each rank then sends in a ring;
    `fast_bytes_per_s` of the fastest 5 % of messages above 1 MiB; `link_bytes_per_s` that each host then sends to the
    others, without the time of sums inside a host if their bandwidth, `inside_bytes_per_s`, is known.
    """

    path: str
    size: int
    events: int
    cut_short: bool
    unfinished: int
    covered_s: float
    ranks: int | None
    hosts: int | None
    cycles: int
    cycle_s: float
    negotiations: int
    naming_ranks: int
    phases: list[Phase]
    sizes: list[SizeClass]
    message_median: float
    bytes_per_s: float
    wire_bytes_per_s: float
    fast_bytes_per_s: float
    link_bytes_per_s: float
    tensors: list[SlowTensor]
    step: StepFigures | None
    rank_rows: list[RankRow]
    inside_bytes_per_s: float = math.nan
    advice: list[str] = field(default_factory=list)
    curves: StepTable | None = None
