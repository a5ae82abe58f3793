"""A finished run: the types of its files, and the figures that reports derive from it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from hvd_bert.storage.reading import Count

LARGEST = 1e300  # so that products and sums are finite
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**53)]
PROCESS_TIMES = ("real_s", "user_s", "system_s")


class Row(Struct):
    """A line of metrics.jsonl: mean loss since the previous line, windows/s, seconds per step and per phase of it."""

    step: AtLeastOne
    loss: Number
    windows_per_s: Positive
    step_s: Positive
    data_s: Number | None = None
    compute_s: Number | None = None
    exposed_comm_s: Number | None = None
    optimizer_s: Number | None = None
    checkpoint_s: Number | None = None
    other_s: Number | None = None


class Process(Struct):
    """Times and memory of a rank's whole process."""

    real_s: Number | None = None
    user_s: Number | None = None
    system_s: Number | None = None
    memory_peak_bytes: Number | None = None


NAMES = {
    "ranks": "world_size", "steps": "train_steps", "windows": "train_samples", "runtime_s": "train_runtime",
    "threads": "threads_per_rank", "places": "ranks", "score_names": "scores",
}  # fmt: skip


class Results(Struct, kw_only=True, rename=NAMES):
    """train_results.json. Older runs lack what has a default."""

    work: dict[str, Any]
    ranks: AtLeastOne
    global_batch: AtLeastOne
    steps: AtLeastOne
    windows: AtLeastOne
    runtime_s: Number
    learning_rate: Number
    seed: Count
    threads: AtLeastOne
    devices_per_rank: AtLeastOne = 1
    strategy: str = "horovod"
    controller: str | None = None
    device_name: str = "unknown"
    unit: str = "windows"
    hosts: list[str] = []
    places: list[dict[str, Any]] = []
    score_names: list[str] = field(default_factory=lambda: ["exact_match", "f1"])
    versions: dict[str, Any] = {}
    processes: list[Process] = []


class Run(Results, kw_only=True, rename=NAMES | {"scores": "values"}):
    """A finished run; None: not recorded. The steady state is every line after the first.

    `work`: settings, model and data; equal if two runs did the same work. `variant`: settings of the strategy.
    `scores`: of the last evaluation. `unit`: what a step takes, such as windows.
    """

    name: str
    variant: Mapping[str, str]
    without_dropout: bool
    rows: tuple[Row, ...]
    scores: Mapping[str, float | None]

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return max(1, len(self.hosts))

    @property
    def devices(self) -> int:
        """Number of GPUs, or of ranks on CPUs."""
        return self.ranks * self.devices_per_rank

    @property
    def on_cpu(self) -> bool:
        """Whether it is known that the ranks are on CPUs."""
        return bool(self.places) and self.places[0].get("device") == "cpu"

    def process_s(self, kind: str) -> float | None:
        """One of PROCESS_TIMES of a rank's whole process: the median over the ranks."""
        known = [value for process in self.processes if (value := getattr(process, kind)) is not None]
        return statistics.median(known) if known else None

    @property
    def memory_bytes(self) -> float | None:
        """The maximum over the ranks."""
        known = [process.memory_peak_bytes for process in self.processes if process.memory_peak_bytes is not None]
        return max(known, default=None)

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
        total = 0.0
        for steps, row in self.steady:
            seconds = getattr(row, f"{phase}_s")
            if seconds is None:
                return None
            total += steps * seconds
        return total / sum(steps for steps, _ in self.steady)

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


class SweepRow(Struct):
    """A point of sweep.json, as far as it is read again."""

    name: str
    strategy: str = ""
    state: str = ""
    reason: str = ""
    seconds: Number | None = None
    command: list[str] = []


class SweepFile(Struct):
    """sweep.json."""

    same: dict[str, Any]
    points: list[SweepRow] = []
