"""Whether two groups of runs did the same work, and learned the same from it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from hvd_bert.runs.run import Run

STRONG, WEAK = "strong", "weak"
EARLY_STEPS = 20
# Losses that differ by less are alike in any case: of answers given with a probability of 0.99 and more.
NATS = 0.01


@dataclass(frozen=True)
class Tolerance:
    """By how much losses may differ, relative to the reference's: of the first steps, and of the last quarter."""

    first: float = 1e-3
    last: float = 0.1


@dataclass(frozen=True)
class Group:
    """Repeats: runs of one strategy at one size that did the same work. Figures are medians over the repeats."""

    runs: tuple[Run, ...]
    label: str

    @property
    def one(self) -> Run:
        """A run of them, for what all have in common."""
        return self.runs[0]

    @property
    def name(self) -> str:
        """For a sentence."""
        run = self.one
        on = f" on {run.nodes} nodes" if run.nodes > 1 else ""
        return f"{self.label}, {run.ranks} rank{'s' * (run.ranks > 1)}{on}"

    @property
    def windows_per_device(self) -> float:
        """Windows that a device takes in a step."""
        return self.one.global_batch / self.one.devices

    @cached_property
    def windows_per_s(self) -> float:
        """In the steady state."""
        return statistics.median(run.windows_per_s for run in self.runs)

    def spread(self) -> tuple[float, float]:
        """The least and the most windows per second of a repeat."""
        speeds = [run.windows_per_s for run in self.runs]
        return min(speeds), max(speeds)

    def median(self, figure: Callable[[Run], float | None]) -> float | None:
        """Of a figure of each run; None where a run lacks it."""
        values = [figure(run) for run in self.runs]
        known = [value for value in values if value is not None]
        return statistics.median(known) if len(known) == len(values) else None


def differences(base: Group, other: Group, kind: str) -> list[str]:
    """What made the work of two groups another, or the devices unlike; empty: they may be compared."""
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
            f"neither as many steps ({two.steps}, the baseline's {one.steps}) nor as many windows ({two.windows}, the"
            f" baseline's {one.windows})"
        )
    if one.on_cpu and two.on_cpu and one.threads != two.threads:
        found.append(f"{two.threads} thread(s) a rank, the baseline's {one.threads}: give all --num_threads alike")
    return found


def losses_differ(reference: Group, group: Group, tolerance: Tolerance) -> str:
    """How the losses of a run of `group` differ from the reference's; "" where they agree.

    Without dropout, of the same seed: those of the first steps, line by line. Always: the means of the last quarter.
    """
    for run in group.runs:
        others = [other for other in reference.runs if other is not run]
        twins = [other for other in others if other.seed == run.seed and run.without_dropout and other.without_dropout]
        for twin in twins:
            said = _first_losses_differ(twin, run, tolerance.first)
            if said:
                return said
        usual = statistics.median(other.last_loss for other in reference.runs)
        if abs(run.last_loss - usual) > max(tolerance.last * usual, NATS):
            return (
                f"the losses do not agree: the mean of the last quarter is {run.last_loss:.4g} in {run.name},"
                f" {usual:.4g} with {reference.name}"
            )
    return ""


def _first_losses_differ(one: Run, two: Run, tolerance: float) -> str:
    """Losses of the lines up to EARLY_STEPS; where the lines are not of the same steps, means of what both have."""
    sums: list[dict[int, float]] = []
    for run in (one, two):
        total, before = {0: 0.0}, 0
        for row in run.rows:
            total[row.step] = total[before] + row.loss * (row.step - before)
            before = row.step
        sums.append(total)
    common = sorted(step for step in sums[0].keys() & sums[1].keys() if step <= EARLY_STEPS)
    for before, step in itertools.pairwise(common):
        expected, found = ((total[step] - total[before]) / (step - before) for total in sums)
        if abs(found - expected) > tolerance * abs(expected):
            return f"the losses do not agree: at step {step} {found:.6g} in {two.name}, {expected:.6g} in {one.name}"
    return ""
