"""Check whether two groups of runs did the same work and have the same losses."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hvd_bert.tools.rendering import counted
from hvd_bert.tools.runs.launching import STRONG

if TYPE_CHECKING:  # numpy
    from hvd_bert.tools.runs.reading import Run

EARLY_STEPS = 20
# Maximum difference of losses, relative to the reference: in the first steps, and in the last quarter.
EARLY_TOLERANCE, LAST_TOLERANCE = 1e-3, 0.1
# Losses that differ by less always agree: 0.01 is the loss of an answer with a probability of 0.99.
NATS = 0.01


@dataclass(frozen=True)
class Group:
    """Repeats: runs of one strategy at one size that did the same work. Figures are medians over the repeats."""

    runs: tuple[Run, ...]
    label: str

    @property
    def one(self) -> Run:
        """One of the runs, for properties that all share."""
        return self.runs[0]

    @property
    def name(self) -> str:
        """Label, ranks and nodes, for a sentence."""
        run = self.one
        on = f" on {run.nodes} nodes" if run.nodes > 1 else ""
        return f"{self.label}, {counted(run.ranks, 'rank')}{on}"

    @cached_property
    def windows_per_s(self) -> float:
        """Median throughput in the steady state."""
        return statistics.median(run.windows_per_s for run in self.runs)

    def spread(self) -> tuple[float, float]:
        """Minimum and maximum windows/s of the repeats."""
        speeds = [run.windows_per_s for run in self.runs]
        return min(speeds), max(speeds)

    @property
    def variation(self) -> float:
        """The range of the repeats over their median."""
        minimum, maximum = self.spread()
        return (maximum - minimum) / self.windows_per_s

    def median(self, figure: Callable[[Run], float | None]) -> float | None:
        """Median of a figure over the runs; None if a run lacks it."""
        values = [figure(run) for run in self.runs]
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) else None


def differences(base: Group, other: Group, kind: str) -> list[str]:
    """The differences in work or devices between two groups; empty if they are comparable."""
    one, two = base.one, other.one
    found = [
        f"{name} is {two.work.get(name, 'unknown')}, the baseline's {one.work.get(name, 'unknown')}"
        for name in dict.fromkeys((*one.work, *two.work))
        if one.work.get(name) != two.work.get(name)
    ]
    if kind == STRONG:
        counts: list[tuple[str, float, float]] = [
            ("steps", two.steps, one.steps),
            ("windows trained on", two.windows, one.windows),
            ("learning rate", two.learning_rate, one.learning_rate),
        ]
        found += [f"{name}: {ours:g}, the baseline's {theirs:g}" for name, ours, theirs in counts if ours != theirs]
    elif one.steps != two.steps and abs(one.windows - two.windows) > max(one.global_batch, two.global_batch):
        found.append(
            f"neither the same steps ({two.steps}, the baseline's {one.steps}) nor the same windows ({two.windows}, the"
            f" baseline's {one.windows})"
        )
    if one.on_cpu and two.on_cpu and one.threads != two.threads:
        found.append(f"{two.threads} thread(s) per rank, the baseline's {one.threads}: use the same --num_threads")
    return found


def losses_differ(reference: Group, group: Group) -> str:
    """How the losses of a run of `group` differ from the reference's; "" if they agree.

    Compares the means of the last quarter; without dropout and with the same seed also the losses of the first steps.
    """
    for run in group.runs:
        others = [other for other in reference.runs if other is not run]
        twins = [other for other in others if other.seed == run.seed and run.without_dropout and other.without_dropout]
        for twin in twins:
            difference = _first_losses_differ(twin, run)
            if difference:
                return difference
        usual = statistics.median(other.last_loss for other in reference.runs)
        if not abs(run.last_loss - usual) <= max(LAST_TOLERANCE * usual, NATS):
            return (
                f"the losses do not agree: the mean of the last quarter is {run.last_loss:.4g} in {run.name},"
                f" {usual:.4g} with {reference.name}"
            )
    return ""


def _first_losses_differ(one: Run, two: Run) -> str:
    """Compare losses up to EARLY_STEPS: means between the steps that both runs logged."""
    sums: list[dict[int, float]] = []
    for lines in (one.lines, two.lines):
        steps, losses = lines["step"].astype(int).tolist(), lines["loss"].tolist()
        spans = itertools.pairwise([0, *steps])
        parts = (loss * (step - before) for (before, step), loss in zip(spans, losses, strict=True))
        sums.append({0: 0.0} | dict(zip(steps, itertools.accumulate(parts), strict=True)))
    common = sorted(step for step in sums[0].keys() & sums[1].keys() if step <= EARLY_STEPS)
    for before, step in itertools.pairwise(common):
        expected, found = ((total[step] - total[before]) / (step - before) for total in sums)
        if not abs(found - expected) <= EARLY_TOLERANCE * abs(expected):
            return f"the losses do not agree: at step {step} {found:.6g} in {two.name}, {expected:.6g} in {one.name}"
    return ""
