"""A finished run, and the figures that reports derive from it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl: mean loss since the previous line, windows/s, seconds per step and per phase of it."""

    step: int
    loss: float
    windows_per_s: float
    step_s: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A finished run; None: not recorded. The steady state is every line after the first.

    `devices`: GPUs, or ranks on CPUs. `work`: settings, model and data; equal if two runs did the same work.
    `variant`: settings of the strategy. `real_s`, `user_s`, `system_s`: of the whole process, medians over the ranks.
    `memory_bytes`: the maximum over the ranks. `scores`: of the last evaluation. `unit`: what a step takes, such as
    windows. `passes`: micro-batches per step. `parameters`: of the model; `late_parameters`: those whose
    gradients are ready only at the end of the backward pass.
    """

    name: str
    strategy: str
    variant: Mapping[str, str]
    nodes: int
    ranks: int
    devices: int
    global_batch: int
    steps: int
    windows: int
    learning_rate: float
    seed: int
    without_dropout: bool
    work: Mapping[str, str]
    device_name: str
    on_cpu: bool
    threads: int
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    runtime_s: float
    real_s: float | None
    user_s: float | None
    system_s: float | None
    memory_bytes: float | None
    scores: Mapping[str, float | None]
    unit: str
    passes: int
    parameters: int | None
    late_parameters: int

    @property
    def steady(self) -> list[tuple[int, Row]]:
        """The lines after the first, each with the number of steps that it covers."""
        return [(row.step - before.step, row) for before, row in itertools.pairwise(self.rows)]

    @property
    def steady_s(self) -> float:
        """Seconds of the steady state."""
        return sum(steps * row.step_s for steps, row in self.steady)

    @property
    def windows_per_s(self) -> float:
        """Windows per second in the steady state."""
        return sum(row.windows_per_s * steps * row.step_s for steps, row in self.steady) / self.steady_s

    @property
    def step_s(self) -> float:
        """Seconds per step in the steady state."""
        return self.steady_s / sum(steps for steps, _ in self.steady)

    def phase_s(self, phase: str) -> float | None:
        """Seconds per step in `phase` in the steady state; None if any line lacks it."""
        if not all(phase in row.phases for _, row in self.steady):
            return None
        total = sum(steps for steps, _ in self.steady)
        return sum(steps * row.phases[phase] for steps, row in self.steady) / total

    @property
    def exposed_share(self) -> float | None:
        """Share of exposed communication in the step time."""
        exposed = self.phase_s("exposed_comm")
        return None if exposed is None else exposed / self.step_s

    @property
    def last_loss(self) -> float:
        """Mean loss over the last quarter of the lines."""
        return statistics.fmean(row.loss for row in self.rows[-max(1, len(self.rows) // 4) :])


@dataclass(frozen=True)
class LeftOut:
    """A run, or a row of a table, without a speed-up, and the reason."""

    name: str
    reason: str
