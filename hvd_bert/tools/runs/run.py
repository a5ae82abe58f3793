"""A finished run: the types of its files, and the figures that reports derive from it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from hvd_bert.storage.reading import Count

LARGEST = 1e300  # so that products and sums are finite
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**53)]
PROCESS_TIMES = ("real_s", "user_s", "system_s")


@dataclass(frozen=True)
class LineArrays:
    """Lines of a JSON Lines file as one array per key, NaN where a line lacks the key."""

    columns: Mapping[str, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, key: str) -> bool:
        return key in self.columns and bool(np.isfinite(self.columns[key]).any())

    def __getitem__(self, key: str) -> NDArray[np.float64]:
        return self.columns.get(key, np.full(len(self), math.nan))

    def of(self, key: str, value: float) -> LineArrays:
        """The lines in which `key` has this value."""
        kept = self[key] == value
        return LineArrays({name: column[kept] for name, column in self.columns.items()})


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
    """A finished run; None: not recorded. `lines`: of its steps; the steady state is every line after the first.

    `work`: settings, model and data; equal if two runs did the same work. `variant`: settings of the strategy.
    `scores`: of the last evaluation. `unit`: what a step takes, such as windows.
    """

    name: str
    variant: Mapping[str, str]
    without_dropout: bool
    lines: LineArrays
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
    def windows_per_s(self) -> float:
        """Windows per second in the steady state."""
        seconds = self.lines["step_s"][1:] * np.diff(self.lines["step"])
        return float(np.average(self.lines["windows_per_s"][1:], weights=seconds))

    def mean(self, key: str) -> float | None:
        """Mean over the steps of the steady state; None if any line lacks it."""
        values = self.lines[key][1:]
        return float(np.average(values, weights=np.diff(self.lines["step"]))) if np.isfinite(values).all() else None

    @property
    def step_s(self) -> float | None:
        """Seconds per step in the steady state."""
        return self.mean("step_s")

    @property
    def exposed_share(self) -> float | None:
        """Share of exposed communication in the step time."""
        exposed, whole = self.mean("exposed_comm_s"), self.mean("step_s")
        return None if exposed is None or whole is None else exposed / whole

    @property
    def last_loss(self) -> float:
        """Mean loss over the last quarter of the lines."""
        losses = self.lines["loss"]
        return float(losses[-max(1, len(losses) // 4) :].mean())


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
