"""A finished training as a report needs it, and what its figures come from."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of metrics.jsonl: mean loss since the line before, windows/s, seconds per step and of each phase of it."""

    step: int
    loss: float
    windows_per_s: float
    step_s: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A finished training. `windows_per_s`, `phases`: of the steady state, which is every line after the first.

    `phases`: seconds per step of each phase that was measured. `devices`: GPUs, or ranks on CPUs. `work`: what must be
    equal for two runs to have done the same; `variant`: how the strategy was set. `real_s`, ...: medians over the
    ranks of the whole process; `memory_bytes`: the most that a rank held. `passes`: forward and backward passes of a
    step; `parameters`: of the model, `late_parameters` those of its embeddings. None: not recorded.
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
    exact_match: float | None
    f1: float | None
    passes: int
    parameters: int | None
    late_parameters: int

    @property
    def steady(self) -> list[tuple[int, Row]]:
        """The lines after the first, each with the number of steps that it sums up."""
        return [(row.step - before.step, row) for before, row in itertools.pairwise(self.rows)]

    @property
    def steady_s(self) -> float:
        """Seconds of the steady state."""
        return sum(steps * row.step_s for steps, row in self.steady)

    @property
    def windows_per_s(self) -> float:
        """Windows of the steady state over its seconds."""
        return sum(row.windows_per_s * steps * row.step_s for steps, row in self.steady) / self.steady_s

    @property
    def step_s(self) -> float:
        """Seconds per step of the steady state."""
        return self.steady_s / sum(steps for steps, _ in self.steady)

    def phase_s(self, phase: str) -> float | None:
        """Seconds per step of the steady state in `phase`; None where it was not measured throughout."""
        if not all(phase in row.phases for _, row in self.steady):
            return None
        total = sum(steps for steps, _ in self.steady)
        return sum(steps * row.phases[phase] for steps, row in self.steady) / total

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication over the step."""
        exposed = self.phase_s("exposed_comm")
        return None if exposed is None else exposed / self.step_s

    @property
    def last_loss(self) -> float:
        """Mean loss over the last quarter of the lines."""
        return statistics.fmean(row.loss for row in self.rows[-max(1, len(self.rows) // 4) :])


@dataclass(frozen=True)
class LeftOut:
    """A run, or a row of a table, that gives no speed-up, and why."""

    name: str
    reason: str
