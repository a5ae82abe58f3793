"""Find runs and read them: all that is known of one, or only a finished one whose speed can be compared."""

from __future__ import annotations

import os
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import numpy as np
from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from hvd_bert.config.settings import in_this_version
from hvd_bert.errors import UserError, visible
from hvd_bert.storage.reading import Count, convert, read_json
from hvd_bert.tools.runs import record as records
from hvd_bert.tools.runs.record import (
    DEFAULT_SCORES,
    EVALUATED_ONLY,
    LARGEST,
    METRICS,
    RESULTS,
    SETTINGS,
    LineArrays,
    Record,
    finite_number,
)

RUN_FILES = {RESULTS, SETTINGS, METRICS, EVALUATED_ONLY}
SWEEP = "sweep.json"  # `hvd-bert bench sweep` writes it to the folder above its runs
# Keys of the record `work` that are not compared: those that differ between repeats, those that the number of steps
# covers, and those of the strategy, which only change how the same gradients are sent.
REPEATED = ("--seed",)
IN_STEPS = ("--num_train_epochs", "--max_steps")
OF_THE_STRATEGY = ("--fp16_allreduce", "--bf16_allreduce")
PROCESS_TIMES = ("real_s", "user_s", "system_s")

Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**53)]


class Process(Struct):
    """Times and memory of a rank's whole process."""

    real_s: Number | None = None
    user_s: Number | None = None
    system_s: Number | None = None
    memory_peak_bytes: Number | None = None


class Results(Struct, kw_only=True):
    """train_results.json. Older runs lack what has a default."""

    work: dict[str, Any]
    ranks: AtLeastOne = field(name="world_size")
    global_batch: AtLeastOne
    steps: AtLeastOne = field(name="train_steps")
    windows: AtLeastOne = field(name="train_samples")
    runtime_s: Number = field(name="train_runtime")
    learning_rate: Number
    seed: Count
    threads: AtLeastOne = field(name="threads_per_rank")
    devices_per_rank: AtLeastOne = 1
    strategy: str = "horovod"
    controller: str | None = None
    device_name: str = "unknown"
    unit: str = "windows"
    machine: dict[str, Any] = {}
    hosts: list[str] = []
    places: list[dict[str, Any]] = field(name="ranks", default_factory=list)
    score_names: list[str] = field(name="scores", default_factory=lambda: [*DEFAULT_SCORES])
    versions: dict[str, Any] = {}
    processes: list[Process] = []


class Run(Results, kw_only=True):
    """A finished run; None: not recorded. `lines`: of its steps; the steady state is every line after the first.

    `work`: settings, model and data; equal if two runs did the same work. `variant`: settings of the strategy.
    `scores`: of the last evaluation. `unit`: what a step takes, such as windows.
    """

    name: str
    variant: Mapping[str, str]
    without_dropout: bool
    lines: LineArrays
    scores: Mapping[str, float | None] = field(name="values")

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

    @property
    def needed_cores(self) -> int:
        """Cores of a host that the ranks on it can use at once, on the host with the most ranks."""
        return max(Counter(str(place.get("host")) for place in self.places).values(), default=1) * self.threads

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


class Unusable(Exception):
    """A run cannot be part of a comparison; the message is the reason."""


@dataclass(frozen=True)
class Excluded:
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
    command: list[str] = []
    points: list[SweepRow] = []


def find(paths: Sequence[Path]) -> list[Path]:
    """The run folders among `paths` and below them, without duplicates. Raises UserError if there are none."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder. Name output folders of `python -m hvd_bert.train`.")
        below = sorted(folder for folder, files in _walk(path) if RUN_FILES & files)
        if not below:
            raise UserError(
                f"{path} contains no run: there is no {RESULTS} or {SETTINGS} in it or in a folder below it."
                " Name output folders of `python -m hvd_bert.train`."
            )
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _walk(path: Path) -> Iterable[tuple[Path, set[str]]]:
    """The folders below, with the names of their files."""
    for folder, subfolders, files in os.walk(path):
        if RUN_FILES & set(files):
            subfolders.clear()  # checkpoints and other subfolders belong to the run
        yield Path(folder), set(files)


def excluded_by_sweeps(paths: Sequence[Path]) -> dict[Path, Excluded]:
    """Runs that a sweep in or below `paths` skipped or that failed: folder (it may not exist) -> run and reason."""
    found: dict[Path, Excluded] = {}
    for folder in _sweeps(paths):
        try:
            points = convert(read_json(folder / SWEEP), SweepFile).points
        except (OSError, ValueError) as error:
            reason = f"{SWEEP} cannot be read: {getattr(error, 'strerror', None) or error}"
            found[folder / SWEEP] = Excluded(str(folder), reason)
            continue
        together: dict[tuple[str, str], list[str]] = {}
        for point in points:
            if point.state in ("skipped", "failed"):
                why = f"{point.state}: {(point.reason or 'no reason is recorded').rstrip('.')}"
                together.setdefault((point.strategy, why), []).append(point.name)
        for (strategy, why), names in together.items():
            excluded = Excluded(f"{strategy} ({', '.join(names)} of {folder})", why)
            found |= {folder / name: excluded for name in names}
    return found


def _sweeps(paths: Sequence[Path]) -> Iterable[Path]:
    return (folder for path in paths for folder, files in _walk(path) if SWEEP in files)


def sweep_commands(paths: Sequence[Path]) -> list[str]:
    """The last command of each sweep in or below `paths`."""
    found = []
    for folder in _sweeps(paths):
        with suppress(OSError, ValueError):  # `excluded_by_sweeps` has the reason
            found.append(shlex.join(convert(read_json(folder / SWEEP), SweepFile).command))
    return list(filter(None, found))


def comparable(records: Sequence[Record], by_sweeps: Mapping[Path, Excluded]) -> tuple[list[Run], list[Excluded]]:
    """The runs among `records` that can be compared, and the others. `by_sweeps`: those of `excluded_by_sweeps`."""
    runs, excluded = [], list(dict.fromkeys(by_sweeps.values()))
    for record in records:
        if Path(record.name) in by_sweeps:
            continue
        try:
            runs.append(to_run(record))
        except Unusable as error:
            excluded.append(Excluded(record.name, str(error)))
    return runs, excluded


@overload
def read(folder: Path) -> Run: ...


@overload
def read(folder: Path, strict: Literal[False]) -> Record: ...


def read(folder: Path, strict: bool = True) -> Run | Record:
    """Read the run in a folder. `strict`: only one whose speed can be compared; raises Unusable for others."""
    record = records.read(folder)
    return to_run(record) if strict else record


def to_run(record: Record) -> Run:
    """A run whose speed can be compared. Raises Unusable."""
    damaged = [problem for problem in record.problems if problem.startswith((RESULTS, METRICS))]
    if damaged:
        raise Unusable(damaged[0])
    if record.state != "finished" or not record.trained:
        raise Unusable(f"not finished: it has no {RESULTS}" if record.trained else "evaluated only, not trained")
    if len(record.worlds) > 1:
        raise Unusable(f"strategy, ranks or device changed on a resume: {', then '.join(record.worlds)}")
    if not record.facts.get("work"):
        raise Unusable(f"its {RESULTS} has no `work`: it was written by an older version")
    try:
        results = convert(record.facts, Results)
    except ValueError as error:
        raise Unusable(f"{RESULTS} is damaged: {error}") from None
    work, settings, lines = _texts(in_this_version(results.work)), record.settings, record.steps
    if not (np.isfinite(lines["loss"]) & (lines["windows_per_s"] > 0) & (lines["step_s"] > 0)).all():
        raise Unusable(f"{METRICS} has a line without its loss, windows_per_s or step_s")
    if len(lines) < 2:
        raise Unusable(f"{METRICS} has {len(lines)} line(s) of steps, but the first is warm-up: lower --logging_steps")
    results.strategy, results.device_name = visible(results.strategy), visible(results.device_name)
    variant = {name: work[name] for name in OF_THE_STRATEGY if name in work}
    variant |= {"--num_groups": str(settings.get("num_groups") or 0)} if results.strategy == "horovod" else {}
    variant |= {"--zero_stage": str(settings.get("zero_stage"))} if results.strategy == "deepspeed" else {}
    results.work = {name: work[name] for name in work if name not in (*REPEATED, *IN_STEPS, *OF_THE_STRATEGY)}
    results.versions = _texts(results.versions)
    no_dropout = work.get("--dropout") in ("0", "0.0") and work.get("--attention_dropout") in ("0", "0.0", "None")
    return Run(
        **asdict(results),
        name=record.name,
        variant=variant | {"controller": visible(str(results.controller))},
        without_dropout=no_dropout,
        lines=lines,
        scores={name: finite_number(record.scores.get(name)) for name in results.score_names},
    )


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {visible(name): visible(str(value)) for name, value in values.items()}
