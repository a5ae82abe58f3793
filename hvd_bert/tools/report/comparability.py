"""Check whether two groups of runs did the same work, and whether their losses agree."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvd_bert.config.settings import difference
from hvd_bert.tools.rendering import counted
from hvd_bert.tools.runs.launching import STRONG
from hvd_bert.tools.runs.record import Record

EARLY_STEPS = 20
# Maximum differences relative to the reference: of each loss in the first steps, and of the last quarter's mean loss.
EARLY_TOLERANCE, LAST_TOLERANCE = 1e-3, 0.1
# Mean losses that differ by less than this always agree: 0.01 is the loss of an answer with a probability of 0.99.
NATS = 0.01


@dataclass(frozen=True)
class Group:
    """Repeated runs with the same strategy, size and work. Figures are medians over the repeats."""

    runs: tuple[Record, ...]
    label: str

    @property
    def first(self) -> Record:
        """The first run, for properties that are equal in all runs of the group."""
        return self.runs[0]

    @property
    def name(self) -> str:
        """Label, number of ranks and, if there are several, number of nodes; for use within a sentence."""
        run = self.first
        on = f" on {run.nodes} nodes" if run.nodes > 1 else ""
        return f"{self.label}, {counted(run.results.world_size, 'rank')}{on}"

    @cached_property
    def speeds(self) -> list[float]:
        """Throughput of each repeat after warm-up, in windows per second."""
        return [run.windows_per_s for run in self.runs]

    @property
    def windows_per_s(self) -> float:
        """Median throughput of the repeats."""
        return statistics.median(self.speeds)

    @property
    def spread(self) -> tuple[float, float]:
        """Minimum and maximum throughput of the repeats."""
        return min(self.speeds), max(self.speeds)

    @property
    def variation(self) -> float:
        """Maximum minus minimum throughput, as a share of the median."""
        return (max(self.speeds) - min(self.speeds)) / self.windows_per_s

    def figure(self, value: Callable[[Record], Any]) -> Any:
        """Combine a figure of all runs: the value if it is equal in all, else the median; None if a run lacks it."""
        values = [value(run) for run in self.runs]
        if None in values or len(set(values)) == 1:
            return None if None in values else values[0]
        return statistics.median(values)


def differences(base: Group, other: Group, kind: str) -> list[str]:
    """Describe differences in work or threads between two groups; empty if they are comparable.

    `kind`: STRONG or WEAK scaling.
    """
    theirs, ours = base.first.work, other.first.work
    settings = other.first.settings, base.first.settings
    found = [
        difference(name, "{} is {}, the baseline's {}", (ours, theirs), settings)
        for name in dict.fromkeys((*theirs, *ours))
        if theirs.get(name) != ours.get(name)
    ]
    one, two = base.first.results, other.first.results
    if kind == STRONG:
        counts: list[tuple[str, float, float]] = [
            ("steps", two.train_steps, one.train_steps),
            ("windows trained on", two.train_samples, one.train_samples),
        ]
        if theirs.get("--learning_rate") == ours.get("--learning_rate"):  # else it is listed above
            counts.append(("learning rate", two.learning_rate, one.learning_rate))
        found += [f"{name}: {new:g}, the baseline's {old:g}" for name, new, old in counts if new != old]
    elif one.train_steps != two.train_steps and (
        abs(one.train_samples - two.train_samples) > max(one.global_batch, two.global_batch)
    ):
        found.append(
            f"neither the same steps ({two.train_steps}, the baseline's {one.train_steps}) nor the same windows"
            f" ({two.train_samples}, the baseline's {one.train_samples})"
        )
    threads = two.threads_per_rank, one.threads_per_rank
    if base.first.on_cpu and other.first.on_cpu and threads[0] != threads[1]:
        found.append(f"{threads[0]} thread(s) per rank, the baseline's {threads[1]}: use the same --num_threads")
    return found


def losses_differ(reference: Group, group: Group) -> str:
    """Describe a difference between the losses of two groups; "" if they agree.

    Compares the means of the last quarter and, without dropout and with the same seed, the losses of the first steps.
    """
    for run in group.runs:
        for other in reference.runs:
            twins = other is not run and other.results.seed == run.results.seed
            exact = twins and run.without_dropout and other.without_dropout
            if exact and (difference := _first_losses_differ(other, run)):
                return difference
        usual = statistics.median(other.last_loss for other in reference.runs)
        if not abs(run.last_loss - usual) <= max(LAST_TOLERANCE * usual, NATS):
            return (
                f"the losses do not agree: the mean of the last quarter is {run.last_loss:.4g} in {run.name},"
                f" {usual:.4g} with {reference.name}"
            )
    return ""


def _first_losses_differ(one: Record, two: Record) -> str:
    """Compare losses up to EARLY_STEPS, as means between steps that both runs logged.

    Describes the first difference; "" if there is none.
    """
    sums: list[dict[int, float]] = []  # step -> sum of the losses up to this step
    for lines in (one.steps, two.steps):
        totals = np.cumsum(lines["loss"] * np.diff(lines["step"], prepend=0))
        sums.append({0: 0.0} | dict(zip(lines["step"].astype(int).tolist(), totals.tolist(), strict=True)))
    common = sorted(step for step in sums[0].keys() & sums[1].keys() if step <= EARLY_STEPS)
    for before, step in itertools.pairwise(common):
        expected, found = ((total[step] - total[before]) / (step - before) for total in sums)
        if not abs(found - expected) <= EARLY_TOLERANCE * abs(expected):
            return f"the losses do not agree: at step {step} {found:.6g} in {two.name}, {expected:.6g} in {one.name}"
    return ""
