"""Compute a timeline's figures: phases, messages, steps, ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hvd_bert.errors import UserError
from hvd_bert.tools.timeline.events import CYCLE, Recording
from hvd_bert.tools.timeline.spans import NEGOTIATION, kind_of, spans_of
from hvd_bert.tools.timeline.steps import FULL, StepTable, steps_of
from hvd_bert.tools.timeline.sums import Phase, RankRow, SizeClass, Sizes, phases_of, ranks_of


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
    if not any(kind_of(name) == NEGOTIATION for name in names):
        own = ", ".join([name for name in names if name != CYCLE][:3])
        reason = f"its events are {own}" if own else "no tensor was sent while it was written"
        raise UserError(f"{path} has none of Horovod's operations: {reason}.")
    spans = spans_of(events, names)
    steps, sizes = _full(steps_of(spans, names)), Sizes(spans.messages, names)
    naming_ranks, speed = int((spans.negotiations.ticks > 0).sum()), sizes.bytes_per_s()
    if naming_ranks or len(recording.ranks) > 1:
        ranks = max(recording.ranks) + 1
    return Findings(
        path=str(path), size=path.stat().st_size, events=len(events), cut_short=recording.cut_short,
        unfinished=spans.unfinished, covered_s=recording.covered_us * 1e-6, ranks=ranks,
        negotiations=len(spans.negotiations), naming_ranks=naming_ranks,
        phases=phases_of(spans, names, recording.covered_us), sizes=sizes.rows(),
        bytes_per_s=speed,
        wire_bytes_per_s=speed * 2 * (ranks - 1) / ranks if ranks else math.nan,
        fast_bytes_per_s=sizes.fast_bytes_per_s(),
        step=_step_figures(steps), rank_rows=ranks_of(spans.negotiations, recording.ranks, steps),
    )  # fmt: skip


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
    middle = {name: float(np.median(column)) for name, column in vars(steps).items()}
    busy = max(float(steps.busy.sum()), 1.0)
    return StepFigures(
        steps=len(steps), step_s=step_us * 1e-6, p99_s=float(np.quantile(took, 0.99)) * 1e-6,
        busy_s=middle["busy"] * 1e-6,
        exposed_least_s=middle["exposed_min"] * 1e-6, exposed_most_s=middle["exposed_max"] * 1e-6,
        exposed_p99_s=float(np.quantile(steps.exposed_max, 0.99)) * 1e-6,
        hidden_share=1 - float(steps.exposed_max.sum()) / busy,
        exposed_least_share=middle["exposed_min"] / step_us, exposed_most_share=middle["exposed_max"] / step_us,
        wait_s=middle["wait"] * 1e-6, wait_p99_s=float(np.quantile(steps.wait, 0.99)) * 1e-6,
        wait_share=middle["wait"] / step_us, messages=middle["messages"], size=middle["size"],
    )  # fmt: skip
