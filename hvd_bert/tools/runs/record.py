"""Everything that a run's folder says about it, also of a run that is still going, has failed or was only evaluated.

What is missing or damaged is listed in `Record.problems`, and the rest is shown.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from hvd_bert.storage import locks
from hvd_bert.storage.locks import LOCK
from hvd_bert.storage.reading import MAX_YAML_BYTES, Kind, convert, parse_json, read_json, read_text

RESULTS, METRICS, SETTINGS = "train_results.json", "metrics.jsonl", "train_config.yaml"
EVALUATED_ONLY, EVALUATION = "eval_config.yaml", "eval_results.json"
EVENTS, SAMPLES, GPUS = "events.jsonl", "eval_samples.json", "gpu_usage.jsonl"
WORLD = ("strategy", "world_size", "device_name")
MAX_METRICS = 2**32  # bytes: millions of lines
DEFAULT_SCORES = ("exact_match", "f1")  # of runs that record no names
RECENT = 20  # lines from which the speed of a run that is still going is computed
MAX_STEP = 2**53  # floats hold all whole numbers up to it
SILENT_S = 300.0  # where a lock cannot be seen: a run that has written nothing for longer is not running any more
LARGEST = 1e300  # of a number, so that products and sums are finite
State = Literal["finished", "running", "ended"]


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

    def where(self, key: str, value: float) -> LineArrays:
        """The lines in which `key` has this value."""
        kept = self[key] == value
        return LineArrays({name: column[kept] for name, column in self.columns.items()})


@dataclass(frozen=True)
class Record:
    """A run.

    Attributes:
        trained: False if the run only evaluated.
        steps, evaluations, gpus: Lines of metrics.jsonl and gpu_usage.jsonl.
        facts: train_results.json; of an unfinished run what it recorded at its start.
        ended: The recorded reason why a run that is not finished has ended; "" if there is none.
        warnings: With the ranks that gave them.
        skipped_steps: Events, with the windows.
        worlds: Strategy, number of ranks and device of its starts: several if they changed on a resume.
        checkpoints: Names of their folders -> steps, in increasing order.
        best: The best evaluation: `metric`, `value`, `step`. Of an unfinished run, by the newest checkpoint.
        problems: Files, or lines of files, that could not be read.
    """

    name: str
    state: State
    trained: bool
    steps: LineArrays
    evaluations: LineArrays
    gpus: LineArrays
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]
    scores: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    checkpoints: Mapping[str, int]
    best: Mapping[str, Any]
    ended: str = ""
    warnings: Sequence[Mapping[str, Any]] = field(default_factory=list)
    skipped_steps: Sequence[Mapping[str, Any]] = field(default_factory=list)
    worlds: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """The last recorded step."""
        steps = self.steps["step"]
        return int(steps[-1]) if len(steps) else 0

    def number(self, key: str) -> float | None:
        """A number of `facts`."""
        return finite_number(self.facts.get(key))

    def entries(self, key: str) -> Sequence[Mapping[str, Any]]:
        """A list of objects of `facts`; empty if it is missing."""
        return objects(self.facts.get(key))

    @property
    def unit(self) -> str:
        """What a step takes, such as windows."""
        return str(self.facts.get("unit", "windows"))

    @property
    def score_names(self) -> list[str]:
        """The names of the task's scores, as in eval_results.json."""
        names = kept(self.facts.get("scores"), list[str], [*DEFAULT_SCORES])
        return [name for name in names if name in self.scores or f"eval_{name}" in self.evaluations]

    def score(self, name: str) -> float | None:
        """The last value of a score."""
        value = finite_number(self.scores.get(name))
        if value is not None:
            return value
        found = self.evaluations[f"eval_{name}"]
        found = found[np.isfinite(found)]
        return float(found[-1]) if len(found) else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds that the remaining steps take at the recent speed, without evaluations; None: unknown."""
        total, recent = self.number("train_steps"), self.steps["step_s"][1:][-RECENT:]
        if total is None or not len(recent):
            return None
        return finite_number(max(0.0, total - self.step) * float(statistics.median(recent)))


def kept(value: Any, kind: type[Kind], default: Kind) -> Kind:
    """A value of this type; the default for another one, as in a damaged file."""
    try:
        return convert(value, kind)
    except ValueError:
        return default


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects in a list; empty for anything else."""
    return [entry for entry in kept(value, list[Any], []) if isinstance(entry, dict)]


def finite_number(value: Any) -> float | None:
    """A finite number of moderate size; None for anything else."""
    finite = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if finite else None


def read(folder: Path) -> Record:
    """Read the run in a folder. It may be written at the same time."""
    problems: list[str] = []
    events = objects(list(_lines(folder / EVENTS, problems)))
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    # A later evaluation in the folder of a training is not how the run was started.
    begins = [events[number] for number in starts if "train_steps" in events[number]]
    since = events[starts[-1] :] if starts else []
    ends = [str(event.get("message")).removeprefix("hvd_bert: ") for event in since if event.get("event") == "end"]
    results = _object(folder / RESULTS, problems)
    rows, evaluations = _metrics(folder / METRICS, problems)
    trained = (folder / SETTINGS).exists() or len(rows) > 0
    finished = bool(results) if trained else (folder / EVALUATION).exists()
    checkpoints = _checkpoints(folder)
    state = _object(folder / [*checkpoints][-1] / "state.json", problems) if checkpoints else {}
    facts = ([*since[:1], *begins] or [{}])[-1] | results
    if isinstance(facts.get("ranks"), list):
        facts.setdefault("world_size", len(facts["ranks"]))
    return Record(
        name=str(folder),
        trained=trained,
        state="finished" if finished else "ended" if ends or not _is_running(folder) else "running",
        steps=rows,
        evaluations=evaluations,
        gpus=_columns(objects(list(_lines(folder / GPUS, problems)))),
        facts=facts,
        settings=read_settings(folder / (SETTINGS if (folder / SETTINGS).exists() else EVALUATED_ONLY)),
        scores=_object(folder / EVALUATION, problems),
        samples=objects(_load(folder / SAMPLES, problems)),
        checkpoints=checkpoints,
        best=kept(facts.get("best") or state.get("best"), dict[str, Any], {}),
        ended="" if finished else "\n".join(dict.fromkeys(ends)),
        warnings=[event for event in events if event.get("event") == "warning"],
        skipped_steps=[event for event in events if event.get("event") == "skipped_step"],
        worlds=list(dict.fromkeys(" ".join(str(each.get(key)) for key in WORLD) for each in begins)),
        problems=problems,
    )


def read_settings(path: Path) -> dict[str, Any]:
    """A run's flags; empty if their file is missing or damaged, since no comparison depends on them."""
    try:
        settings = yaml.safe_load(read_text(path, MAX_YAML_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError, OverflowError):
        return {}
    return {str(name): value for name, value in settings.items()} if isinstance(settings, dict) else {}


def _is_running(folder: Path) -> bool:
    try:
        if locks.is_held(folder / LOCK):
            return True
        if not locks.names_another_host(folder / LOCK):
            return False
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks
        pass
    written = [folder / METRICS, folder / EVENTS, *folder.glob("checkpoint-*")]
    return any(path.exists() and time.time() - path.stat().st_mtime < SILENT_S for path in written)


def _load(path: Path, problems: list[str]) -> Any:
    """A JSON file's content; an empty object if it is missing or damaged."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return {}


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    return kept(_load(path, problems), dict[str, Any], {})


def _lines(path: Path, problems: list[str]) -> Iterator[Any]:
    """The values of a JSON Lines file. A last line without its end is being written."""
    try:
        lines = read_text(path, MAX_METRICS, "replace").split("\n")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}")
        return
    damaged = []
    for number, line in enumerate(lines, start=1):
        try:
            yield parse_json(line)
        except ValueError:
            if number < len(lines):
                damaged.append(number)
    if damaged:
        problems.append(f"{path.name}: {len(damaged):,} damaged line(s), the first is line {damaged[0]}")


def _metrics(path: Path, problems: list[str]) -> tuple[LineArrays, LineArrays]:
    """The lines of the steps, in increasing order, and those of the evaluations."""
    steps: list[Mapping[str, Any]] = []
    evaluations: list[Mapping[str, Any]] = []
    left_out = 0
    for line in _lines(path, problems):
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            continue
        evaluated = any(key.startswith("eval_") for key in line)
        first = steps[-1]["step"] + 1 if steps and not evaluated else 0
        if first <= line["step"] < MAX_STEP:
            (evaluations if evaluated else steps).append(line)
        else:
            left_out += 1
    if left_out:
        problems.append(f"{path.name}: lines without a step that increases are left out ({left_out})")
    return _columns(steps), _columns(evaluations)


def _columns(lines: Sequence[Mapping[str, Any]]) -> LineArrays:
    keys = dict.fromkeys(key for line in lines for key in line)
    return LineArrays({key: np.array([finite_number(line.get(key)) for line in lines], np.float64) for key in keys})


def _checkpoints(folder: Path) -> dict[str, int]:
    """The checkpoints by step; without those that were set aside."""
    steps = ((path.name, path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))
    return dict(
        sorted(((name, int(step)) for name, step in steps if step.isascii() and step.isdecimal()), key=itemgetter(1))
    )
