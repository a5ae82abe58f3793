"""Read the folder of a run, whether it has finished, is still running, has failed, or has only evaluated.

Damaged files are listed in `Record.problems`. Properties that use `Record.results` need a comparable run
(`Record.comparable`).
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from msgspec import Meta, Struct

from hvd_bert.config.data import SQUAD_RULES, other_rules
from hvd_bert.config.settings import FLAGS, in_this_version
from hvd_bert.errors import visible
from hvd_bert.storage import locks
from hvd_bert.storage.locks import LOCK
from hvd_bert.storage.reading import MAX_YAML_BYTES, Count, Positive, convert, read_text
from hvd_bert.tools.rendering import SHORT
from hvd_bert.tools.runs import tolerant
from hvd_bert.tools.runs.tolerant import LARGEST, LineArrays, converted, finite_number, objects
from hvd_bert.tools.runs.trainer_flags import OWNERS

RESULTS, METRICS, SETTINGS = "train_results.json", "metrics.jsonl", "train_config.yaml"
EVALUATED_ONLY, EVALUATION = "eval_config.yaml", "eval_results.json"
EVENTS, SAMPLES, GPUS = "events.jsonl", "eval_samples.json", "gpu_usage.jsonl"
WORLD = ("strategy", "world_size", "device_name")
DEFAULT_SCORES = tuple(SHORT)  # for runs that do not record the names of their scores
SILENT_S = 300.0  # seconds: if locks cannot be checked, a run counts as running for this time after its last write
State = Literal["finished", "running", "ended"]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
# Strategy-specific flags, which change how gradients are sent.
OWNED = {f"--{name}": FLAGS[name] for name in OWNERS}
# Keys of `work` in train_results.json that differ between repeats, or depend on the number of steps.
NOT_COMPARED = ("--seed", "--num_train_epochs", "--max_steps")


class TrainResults(Struct, kw_only=True):
    """The values of train_results.json that a comparison needs. Values with a default are missing in older runs."""

    work: dict[str, Any]
    world_size: Positive
    global_batch: Positive
    train_steps: Positive
    train_samples: Positive
    train_runtime: Number
    learning_rate: Number
    seed: Count
    threads_per_rank: Positive
    devices_per_rank: Positive = 1
    strategy: str = "horovod"
    controller: str | None = None
    device_name: str = "unknown"
    machine: dict[str, Any] = {}
    hosts: list[str] = []
    ranks: list[dict[str, Any]] = []
    scores: tuple[str, ...] = DEFAULT_SCORES
    processes: list[dict[str, Number | None]] = []


@dataclass(frozen=True, eq=False)
class Record:
    """The content of a run's files."""

    name: str
    state: State
    trained: bool  # False if the run only evaluated
    steps: LineArrays  # lines of metrics.jsonl
    evaluations: LineArrays
    gpus: LineArrays  # lines of gpu_usage.jsonl
    facts: Mapping[str, Any]  # the record of the training's start, overridden by train_results.json
    settings: Mapping[str, Any]
    scores: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[int]  # steps, in increasing order
    best: Mapping[str, Any]  # `metric`, `value` and `step`; for an unfinished run, from the newest checkpoint
    ended: str  # the recorded reason why an unfinished run has ended; "" if unknown
    warnings: Sequence[Mapping[str, Any]]  # warning events, with their ranks
    skipped_steps: Sequence[Mapping[str, Any]]  # events of skipped steps, with the steps' windows
    worlds: Sequence[str]  # strategy, number of ranks and device at each start, without repeats
    problems: Sequence[str]  # files, or lines of files, that could not be read

    def __repr__(self) -> str:
        """Describe the run in a line: its files fill screens of a notebook."""
        scores = {name: self.score(name) for name in self.score_names}
        return f"Record(name={self.name!r}, state={self.state!r}, step={self.step}, scores={scores})"

    @property
    def step(self) -> int:
        """The last recorded step."""
        steps = self.steps["step"]
        return int(steps[-1]) if len(steps) else 0

    def number(self, key: str) -> float | None:
        """Return the number `key` of `facts`; None if it is missing or not finite."""
        return finite_number(self.facts.get(key))

    def object(self, key: str) -> Mapping[str, Any]:
        """Return the object `key` of `facts`; empty if it is missing."""
        return converted(self.facts.get(key), dict[str, Any], {})

    def entries(self, key: str) -> Sequence[Mapping[str, Any]]:
        """Return the list of objects `key` of `facts`; empty if it is missing."""
        return objects(self.facts.get(key))

    @property
    def unit(self) -> str:
        """The unit of a batch, such as windows."""
        return str(self.facts.get("unit", "windows"))

    @property
    def rules(self) -> str:
        """The suffix that names the rules of the scores, such as " (zh)"; "" for SQuAD's and other tasks."""
        return _rules(self.scores or self.settings)

    @property
    def curve_rules(self) -> str:
        """The rules, see `rules`, of the evaluations in metrics.jsonl. Other rules may have scored the model later."""
        return _rules(self.settings)

    @property
    def score_names(self) -> list[str]:
        """Names of the task's scores, as in eval_results.json."""
        names = converted(self.facts.get("scores"), list[str], [*DEFAULT_SCORES])
        return [name for name in names if name in self.scores or f"eval_{name}" in self.evaluations]

    def score(self, name: str) -> float | None:
        """Return a score's value in eval_results.json, else in the last evaluation logged; None if unknown."""
        value = finite_number(self.scores.get(name))
        if value is not None:
            return value
        found = self.evaluations[f"eval_{name}"]
        found = found[np.isfinite(found)]
        return float(found[-1]) if len(found) else None

    def comparable(self) -> str:
        """Return the reason why the speed of the run cannot be compared with other runs'; "" if it can."""
        damaged = [problem for problem in self.problems if problem.startswith((RESULTS, METRICS))]
        if damaged:
            return damaged[0]
        if self.state != "finished" or not self.trained:
            return f"not finished: it has no {RESULTS}" if self.trained else "evaluated only, not trained"
        if len(self.worlds) > 1:
            return f"strategy, ranks or device changed on a resume: {', then '.join(self.worlds)}"
        if not self.facts.get("work"):
            return f"its {RESULTS} has no `work`: it was written by an older version"
        try:
            convert(self.facts, TrainResults)
        except ValueError as error:
            return f"{RESULTS} is damaged: {error}"
        lines = self.steps
        if not (np.isfinite(lines["loss"]) & (lines["windows_per_s"] > 0) & (lines["step_s"] > 0)).all():
            return f"{METRICS} has a line without its loss, windows_per_s or step_s"
        if len(lines) < 2:
            return f"{METRICS} has {len(lines)} line(s) of steps, but the first is warm-up: lower --logging_steps"
        return ""

    @cached_property
    def results(self) -> TrainResults:
        """train_results.json with checked types."""
        results = convert(self.facts, TrainResults)
        results.strategy, results.device_name = visible(results.strategy), visible(results.device_name)
        return results

    @cached_property
    def _identity(self) -> dict[str, str]:
        identity = in_this_version(self.results.work)
        return {visible(name): visible(str(value)) for name, value in identity.items()}

    @property
    def work(self) -> Mapping[str, str]:
        """Settings, model and data, which must be equal in compared runs."""
        return {name: value for name, value in self._identity.items() if name not in (*NOT_COMPARED, *OWNED)}

    @property
    def variant(self) -> Mapping[str, str]:
        """The strategy-specific settings and Horovod's controller, which only change how gradients are sent."""
        found = {name: self._identity[name] for name in OWNED if name in self._identity}
        for name, flag in OWNED.items():
            if name not in found and flag.owner == self.results.strategy:
                value = self.settings.get(name[2:])
                found[name] = str(flag.default if value is None else value)  # older runs did not record it in `work`
        return found | {"controller": visible(str(self.results.controller))}

    @property
    def without_dropout(self) -> bool:
        """Whether the run trained without dropout, so that the losses do not depend on random numbers."""
        work = self._identity
        return work.get("--dropout") in ("0", "0.0") and work.get("--attention_dropout") in ("0", "0.0", "None")

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return max(1, len(self.results.hosts))

    @property
    def devices(self) -> int:
        """Number of GPUs; on CPUs, number of ranks."""
        return self.results.world_size * self.results.devices_per_rank

    @property
    def on_cpu(self) -> bool:
        """Whether the ranks are on CPUs; False if unknown."""
        return bool(self.results.ranks) and self.results.ranks[0].get("device") == "cpu"

    @property
    def needed_cores(self) -> int:
        """Number of threads of all ranks on the host with the most ranks."""
        by_host = Counter(str(rank.get("host")) for rank in self.results.ranks)
        return max(by_host.values(), default=1) * self.results.threads_per_rank

    def of_processes(self, key: str, over: Callable[[list[float]], float] = statistics.median) -> float | None:
        """Apply `over` to the ranks' values of a figure, such as `user_s`; None if no rank has the figure."""
        known = [value for process in self.results.processes if (value := process.get(key)) is not None]
        return over(known) if known else None

    @property
    def memory_bytes(self) -> float | None:
        """Peak memory per rank, maximum over the ranks."""
        return self.of_processes("memory_peak_bytes", max)

    @property
    def windows_per_s(self) -> float:
        """Windows per second over all log lines after the first, which is warm-up; NaN if there are none."""
        return self.steps.mean("windows_per_s", by_time=True)

    @property
    def wh_per_1000(self) -> float | None:
        """Energy of the GPUs in Wh per 1,000 windows; None if unknown."""
        energy, windows = self.number("energy_wh"), self.number("train_samples")
        return 1000 * energy / windows if energy is not None and windows else None

    @property
    def exposed_share(self) -> float | None:
        """Share of exposed communication in the step time; None if any log line after the first lacks it."""
        known = np.isfinite(self.steps["exposed_comm_s"][1:]).all()
        return self.steps.mean("exposed_comm_s") / self.steps.mean("step_s") if known else None

    @property
    def last_loss(self) -> float:
        """Mean loss over the last quarter of the log lines."""
        losses = self.steps["loss"]
        return float(losses[-max(1, len(losses) // 4) :].mean())

    @property
    def final_scores(self) -> Mapping[str, float | None]:
        """The task's scores in the last evaluation."""
        return {name: finite_number(self.scores.get(name)) for name in self.results.scores}


def read(folder: Path) -> Record:
    """Read the run in a folder, even while the run is writing to it."""
    problems: list[str] = []
    events = objects(list(tolerant.read_lines(folder / EVENTS, problems)))
    starts = [number for number, event in enumerate(events) if event.get("event") == "start"]
    # Only starts of trainings: a later evaluation may have used the folder.
    begins = [events[number] for number in starts if "train_steps" in events[number]]
    since = events[starts[-1] :] if starts else []
    ends = [str(event.get("message")).removeprefix("hvd_bert: ") for event in since if event.get("event") == "end"]
    results = tolerant.load(folder / RESULTS, problems, dict[str, Any])
    rows, evaluations = tolerant.read_metrics(folder / METRICS, problems)
    trained = (folder / SETTINGS).exists() or len(rows) > 0
    finished = bool(results) if trained else (folder / EVALUATION).exists()
    checkpoints = _checkpoints(folder)
    newest = folder / f"checkpoint-{max(checkpoints, default=0)}"
    state = tolerant.load(newest / "state.json", problems, dict[str, Any])
    facts = ([*since[:1], *begins] or [{}])[-1] | results
    if isinstance(facts.get("ranks"), list):
        facts.setdefault("world_size", len(facts["ranks"]))
    return Record(
        name=str(folder),
        trained=trained,
        state="finished" if finished else "ended" if ends or not _is_running(folder) else "running",
        steps=rows,
        evaluations=evaluations,
        gpus=tolerant.columns(objects(list(tolerant.read_lines(folder / GPUS, problems)))),
        facts=facts,
        settings=_read_settings(folder / (SETTINGS if (folder / SETTINGS).exists() else EVALUATED_ONLY)),
        scores=tolerant.load(folder / EVALUATION, problems, dict[str, Any]),
        samples=objects(tolerant.load(folder / SAMPLES, problems, list[Any])),
        checkpoints=checkpoints,
        best=converted(facts.get("best") or state.get("best"), dict[str, Any], {}),
        ended="" if finished else "\n".join(dict.fromkeys(ends)),
        warnings=[event for event in events if event.get("event") == "warning"],
        skipped_steps=[event for event in events if event.get("event") == "skipped_step"],
        worlds=list(dict.fromkeys(" ".join(str(each.get(key)) for key in WORLD) for each in begins)),
        problems=problems,
    )


def _rules(recorded: Mapping[str, Any]) -> str:
    rules = other_rules(str(recorded.get("answer_language") or SQUAD_RULES))
    return f" ({visible(rules)})" if rules else ""


def _read_settings(path: Path) -> dict[str, Any]:
    """Read a run's flags; empty if the file is missing or damaged."""
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


def _checkpoints(folder: Path) -> list[int]:
    """List the steps of the checkpoints in increasing order, except checkpoints that were set aside."""
    names = (re.fullmatch("checkpoint-(0|[1-9][0-9]*)", path.name) for path in folder.glob("checkpoint-*"))
    return sorted(int(name[1]) for name in names if name)
