"""Compute a timeline's figures: time per phase and per message size, steps, and how late each rank is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvd_bert.errors import UserError
from hvd_bert.tools.timeline.events import CYCLE, NONE, Array, Recording
from hvd_bert.tools.timeline.spans import COLLECTIVE, NEGOTIATION, Messages, Negotiations, Spans, find_spans, span_kind
from hvd_bert.tools.timeline.steps import FULL, StepTable, find_steps

LATE_US = 2000  # twice Horovod's cycle: below that, ranks may have been seen in the same cycle
SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes: upper limits of the classes of messages
BIG = 1 << 20  # bytes: smaller messages are mostly latency and do not count for the bandwidth
FAST = 0.05  # share of the big messages that were delayed neither by computation nor by a late rank


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


@dataclass(frozen=True)
class StepFigures:
    """Figures of the steps after the first. Seconds are medians, `least` and `most` bounds, shares of `step_s`."""

    steps: int
    step_s: float
    p99_s: float
    busy_s: float
    exposed_least_s: float
    exposed_most_s: float
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
    """All findings of a file. `ranks`: number of ranks, None if unknown.

    Bandwidths: `bytes_per_s` of large messages; `wire_bytes_per_s` that each rank then sends in a ring;
    `fast_bytes_per_s` of the fastest 5 % of messages above 1 MiB.
    """

    path: str
    size: int
    events: int
    cut_short: bool
    unfinished: int
    covered_s: float
    ranks: int | None
    negotiations: int
    naming_ranks: int
    phases: list[Phase]
    sizes: list[SizeClass]
    bytes_per_s: float
    wire_bytes_per_s: float
    fast_bytes_per_s: float
    step: StepFigures | None
    rank_rows: list[RankRow]
    advice: list[str] = field(default_factory=list)


def analyse(path: Path, ranks: int | None) -> Findings:
    """Analyze a file. `ranks`: number of ranks, if the file does not name them. Raises UserError."""
    recording = Recording()
    events, names = recording.events(path), recording.names
    if not any(span_kind(name) == NEGOTIATION for name in names):
        own = ", ".join([name for name in names if name != CYCLE][:3])
        reason = f"its events are {own}" if own else "no tensor was sent while it was written"
        raise UserError(f"{path} has none of Horovod's operations: {reason}.")
    spans = find_spans(events, names)
    steps, sizes = _full(find_steps(spans, names)), Sizes(spans.messages, names)
    naming_ranks, speed = int((spans.negotiations.ticks > 0).sum()), sizes.bytes_per_s()
    if naming_ranks or len(recording.ranks) > 1:
        ranks = max(recording.ranks) + 1
    return Findings(
        path=str(path),
        size=path.stat().st_size,
        events=len(events),
        cut_short=recording.cut_short,
        unfinished=spans.unfinished,
        covered_s=recording.covered_us * 1e-6,
        ranks=ranks,
        negotiations=len(spans.negotiations),
        naming_ranks=naming_ranks,
        phases=phase_times(spans, names, recording.covered_us),
        sizes=sizes.rows(),
        bytes_per_s=speed,
        wire_bytes_per_s=speed * 2 * (ranks - 1) / ranks if ranks else math.nan,
        fast_bytes_per_s=sizes.fast_bytes_per_s(),
        step=_step_figures(steps),
        rank_rows=rank_lags(spans.negotiations, recording.ranks, steps),
    )


def _full(steps: StepTable | None) -> StepTable | None:
    """The steps with the usual number of tensors, without the first, which includes set-up."""
    if steps is None or len(steps) < 3:
        return None
    usual = float(np.median(steps.tensors))
    rows = np.flatnonzero(steps.tensors >= FULL * usual)
    rows = rows[rows > 0]
    return steps.only(rows) if len(rows) > 1 else None


def _step_figures(steps: StepTable | None) -> StepFigures | None:
    if steps is None:
        return None
    took = steps.times()
    step_us = float(np.median(took)) if len(took) else 0.0
    if step_us <= 0:
        return None
    medians = {name: float(np.median(column)) for name, column in vars(steps).items()}
    busy = max(float(steps.busy.sum()), 1.0)
    return StepFigures(
        steps=len(steps),
        step_s=step_us * 1e-6,
        p99_s=float(np.quantile(took, 0.99)) * 1e-6,
        busy_s=medians["busy"] * 1e-6,
        exposed_least_s=medians["exposed_min"] * 1e-6,
        exposed_most_s=medians["exposed_max"] * 1e-6,
        hidden_share=1 - float(steps.exposed_max.sum()) / busy,
        exposed_least_share=medians["exposed_min"] / step_us,
        exposed_most_share=medians["exposed_max"] / step_us,
        wait_s=medians["wait"] * 1e-6,
        wait_p99_s=float(np.quantile(steps.wait, 0.99)) * 1e-6,
        wait_share=medians["wait"] / step_us,
        messages=medians["messages"],
        size=medians["size"],
    )


def quantile(values: Array, part: float) -> float:
    """A quantile; NaN if there are no values."""
    return float(np.quantile(values, part)) if len(values) else math.nan


def phase_times(spans: Spans, names: Sequence[str], covered_us: int) -> list[Phase]:
    """Times of each kind of span, negotiations first."""
    found = []
    for rows in (spans.negotiations, spans.activities):
        for code in np.unique(rows.code).tolist():
            own = np.flatnonzero(rows.code == code)
            own = own[np.argsort(rows.start[own], kind="stable")]
            start, end = rows.start[own], rows.end[own]
            reached = np.maximum.accumulate(np.append(0, end))[:-1]
            covered = int(np.maximum(0, end - np.maximum(start, reached)).sum())
            took, share = np.maximum(0, end - start) * 1e-6, covered / max(1, covered_us)
            ends = quantile(took, 0.5), quantile(took, 0.99)
            found.append(Phase(names[code], _phase_kind(names[code]), len(took), covered * 1e-6, share, *ends))
    order = ["negotiation", "wait", "queue", "copy", "collective", "set-up"]
    return sorted(found, key=lambda phase: (order.index(phase.kind), -phase.total_s))


def _phase_kind(name: str) -> str:
    """The kind of a phase, as in timeline/content.py."""
    known = {NEGOTIATION: "negotiation", COLLECTIVE: "collective"}.get(span_kind(name))
    if known or name == "QUEUE":
        return known or "queue"
    return "wait" if name.startswith("WAIT") else "copy" if name.startswith(("MEMCPY", "COPY")) else "set-up"


class Sizes:
    """The allreduces whose size and time are known. `names`: of spans by code."""

    def __init__(self, messages: Messages, names: Sequence[str]) -> None:
        allreduce = np.array([name == "ALLREDUCE" for name in names])
        known = allreduce[messages.code] & (messages.size >= 0) & (messages.collective != NONE)
        rows = messages.only(np.flatnonzero(known & (messages.received >= messages.sent)))
        self.size, self.tensors, self.took_us = rows.size, rows.tensors, rows.received - rows.sent

    def rows(self) -> list[SizeClass]:
        """A row per class of sizes that occurs."""
        limits, which, found = [*SIZES, None], np.searchsorted(SIZES, self.size, side="left"), []
        for number in np.unique(which).tolist():
            own = which == number
            size, took = int(self.size[own].sum()), self.took_us[own]
            speed = size / max(1, int(took.sum())) * 1e6
            tensors = int(self.tensors[own].sum())
            found.append(SizeClass(limits[number], len(took), tensors, size, quantile(took, 0.5) * 1e-6, speed))
        return found

    def bytes_per_s(self) -> float:
        """Bandwidth of messages above 1 MiB if these carry half of all bytes, else of all messages."""
        big = self.size > BIG
        counted = big if 2 * self.size[big].sum() >= self.size.sum() else np.ones_like(big)
        took = int(self.took_us[counted].sum())
        return int(self.size[counted].sum()) / took * 1e6 if took else math.nan

    def fast_bytes_per_s(self) -> float:
        """Bandwidth of the fastest 5 % of messages above 1 MiB; NaN if there are none."""
        big = self.size > BIG
        return quantile(self.size[big] / np.maximum(self.took_us[big], 1) * 1e6, 1 - FAST)


def rank_lags(negotiations: Negotiations, ranks: set[int], steps: StepTable | None) -> list[RankRow]:
    """How often, and by how much, each rank is last."""
    late, found = negotiations.lag > LATE_US, []
    named = int((negotiations.ticks > 0).sum())
    for rank in sorted(ranks):
        lags = negotiations.lag[late & (negotiations.last_rank == rank)] * 1e-6
        lag, of_steps = np.zeros(0), 0
        if steps is not None:
            of_steps = int((steps.last_rank != NONE).sum())
            lag = steps.lag[(steps.last_rank == rank) & (steps.lag > LATE_US)] * 1e-6
        of_tensors = len(lags), len(lags) / max(1, named), quantile(lags, 0.5), quantile(lags, 0.99)
        found.append(RankRow(rank, *of_tensors, len(lag), of_steps, quantile(lag, 0.5), float(lag.sum())))
    return found
