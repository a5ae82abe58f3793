"""The figures that a timeline comes to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from hvd_bert.timeline.byte_parser import Array
from hvd_bert.timeline.steps import StepTable


class Spread:
    """Sum and quantiles of whole numbers, to 1 %, in a table of fixed size."""

    FINE = 64  # bins between a number and its double; below that, a bin a number

    def __init__(self) -> None:
        self.bins = np.zeros(self.FINE * 60, np.int64)
        self.total, self.maximum = 0, 0

    def add(self, values: Array) -> None:
        """Count numbers, none below 0."""
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
        """How many."""
        return int(self.bins.sum())

    def quantile(self, part: float) -> float:
        """NaN of none."""
        if not self.count:
            return math.nan
        at = int(np.searchsorted(np.cumsum(self.bins), part * self.count, side="left"))
        middle = float(at) if at < self.FINE else self.FINE * 2 ** ((at + 0.5) / self.FINE - 1)
        return min(middle, float(self.maximum))


@dataclass(frozen=True)
class Phase:
    """`count`: of tensors for negotiations, else of messages. `total_s`: while at least one was in it."""

    name: str
    kind: str
    count: int
    total_s: float
    share: float
    median_s: float
    p99_s: float


@dataclass(frozen=True)
class SlowTensor:
    """Means of a tensor's operations: waiting until all ranks were ready, then copies and collective."""

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
    """`last`: negotiations of a tensor in which this rank came last, by more than 2 ms; `share`: of those that name
    ranks. `steps`: those in which it was the last by more than that, of `of_steps`; `waited_s`: for it, in all."""

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
    """Of steps after the first. Seconds are medians; exposed is between `least` and `most`; shares are of `step_s`."""

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
    """All that is known of a file. `ranks`: how many there were, None if it cannot be told; `hosts`: as given.

    Of large messages: `bytes_per_s`; `wire_bytes_per_s`: what a ring has each rank send for that. Of the fastest
    twentieth of those above 1 MiB: `fast_bytes_per_s`; `link_bytes_per_s`: what each host sends to the others for that,
    without the time that sums inside a host take where those are known: `inside_bytes_per_s`, of one host.
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
