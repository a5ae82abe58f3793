"""Sums over a timeline's batches: time per phase and per message size, and how late each rank is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_bert.tools.timeline.rows import NONE, Array, Batch, Messages
from hvd_bert.tools.timeline.spans import COLLECTIVE, NEGOTIATION, kind_of
from hvd_bert.tools.timeline.steps import StepTable

LATE_US = 2000  # twice Horovod's cycle: below that, ranks may have been seen in the same cycle
SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes: upper limits of the classes of messages
BIG = 1 << 20  # bytes: smaller messages are mostly latency and do not count for the bandwidth
FAST = 0.05  # share of the big messages that were delayed neither by computation nor by a late rank


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


class Phases:
    """Times of each kind of span."""

    def __init__(self) -> None:
        self.spreads: dict[int, Spread] = {}
        self.covered: dict[int, float] = {}
        self.until: dict[int, int] = {}

    def add(self, batch: Batch) -> None:
        """Add the negotiations and activities of a batch."""
        for rows in (batch.negotiations, batch.activities):
            self._add(rows.code, rows.start, rows.end)

    def _add(self, code: Array, start: Array, end: Array) -> None:
        for one in np.unique(code).tolist():
            rows = np.flatnonzero(code == one)
            begin, over = start[rows], end[rows]
            self.spreads.setdefault(one, Spread()).add(over - begin)
            sort = np.argsort(begin, kind="stable")
            begin, over = begin[sort], over[sort]
            reached = np.maximum.accumulate(np.append(self.until.get(one, 0), over))
            self.covered[one] = self.covered.get(one, 0) + int(
                np.maximum(0, over - np.maximum(begin, reached[:-1])).sum()
            )
            self.until[one] = int(reached[-1])

    def rows(self, names: Sequence[str], covered_us: int) -> list[Phase]:
        found = [
            Phase(
                names[code], _kind(names[code]), spread.count,
                self.covered[code] * 1e-6, self.covered[code] / max(1, covered_us), spread.quantile(0.5) * 1e-6,
                spread.quantile(0.99) * 1e-6,
            )
            for code, spread in self.spreads.items()
        ]  # fmt: skip
        order = ["negotiation", "wait", "queue", "copy", "collective", "set-up"]
        return sorted(found, key=lambda phase: (order.index(phase.kind), -phase.total_s))


def _kind(name: str) -> str:
    """The kind of a phase, as in timeline/content.py."""
    known = {NEGOTIATION: "negotiation", COLLECTIVE: "collective"}.get(kind_of(name))
    if known or name == "QUEUE":
        return known or "queue"
    return "wait" if name.startswith("WAIT") else "copy" if name.startswith(("MEMCPY", "COPY")) else "set-up"


class Sizes:
    """Allreduces by the size of their message."""

    def __init__(self) -> None:
        self.times = [Spread() for _ in range(len(SIZES) + 1)]
        self.tensors = np.zeros(len(SIZES) + 1, np.int64)
        self.bytes = np.zeros(len(SIZES) + 1, np.int64)
        self.big_speeds = Spread()  # bytes per ms of each message above BIG

    def add(self, messages: Messages, allreduce: int) -> None:
        rows = (messages.code == allreduce) & (messages.size >= 0) & (messages.collective != NONE)
        rows = np.flatnonzero(rows & (messages.received >= messages.sent))
        size, took = messages.size[rows], (messages.received - messages.sent)[rows]
        which = np.searchsorted(SIZES, size, side="left")
        big = size > BIG
        self.big_speeds.add(size[big] * 1000 // np.maximum(took[big], 1))
        for number, times in enumerate(self.times):
            own = which == number
            times.add(took[own])
            self.tensors[number] += int(messages.tensors[rows][own].sum())
            self.bytes[number] += int(size[own].sum())

    def rows(self) -> list[SizeClass]:
        limits = [*SIZES, None]
        return [
            SizeClass(
                limits[number], times.count, int(self.tensors[number]), int(self.bytes[number]),
                times.quantile(0.5) * 1e-6, int(self.bytes[number]) / max(1, times.total) * 1e6,
            )
            for number, times in enumerate(self.times)
            if times.count
        ]  # fmt: skip

    def bytes_per_s(self) -> float:
        """Bandwidth of messages above 1 MiB if these carry half of all bytes, else of all messages."""
        big = SIZES.index(BIG) + 1
        start = big if self.bytes[big:].sum() * 2 >= self.bytes.sum() else 0
        took = sum(times.total for times in self.times[start:])
        return float(self.bytes[start:].sum()) / took * 1e6 if took else math.nan

    def fast_bytes_per_s(self) -> float:
        """Bandwidth of the fastest 5 % of messages above 1 MiB; NaN if there are none."""
        return self.big_speeds.quantile(1 - FAST) * 1000


class Ranks:
    """How often, and by how much, each rank is last."""

    def __init__(self) -> None:
        self.lags: dict[int, Spread] = {}
        self.negotiations = self.named = 0

    def add(self, batch: Batch) -> None:
        rows = batch.negotiations
        named = rows.ticks > 0
        self.negotiations += len(named)
        self.named += int(named.sum())
        late = named & (rows.lag > LATE_US)
        for rank in np.unique(rows.last_rank[late]).tolist():
            self.lags.setdefault(rank, Spread()).add(rows.lag[late & (rows.last_rank == rank)])

    def rows(self, ranks: set[int], steps: StepTable | None) -> list[RankRow]:
        found = []
        for rank in sorted(ranks):
            lags = self.lags.get(rank, Spread())
            lag, of_steps = np.zeros(0), 0
            if steps is not None:
                of_steps = int((steps.last_rank != NONE).sum())
                lag = steps.lag[(steps.last_rank == rank) & (steps.lag > LATE_US)]
            found.append(
                RankRow(
                    rank, lags.count, lags.count / max(1, self.named), lags.quantile(0.5) * 1e-6,
                    lags.quantile(0.99) * 1e-6, len(lag), of_steps,
                    float(np.median(lag)) * 1e-6 if len(lag) else math.nan, float(lag.sum()) * 1e-6,
                )
            )  # fmt: skip
        return found
