"""Reads runs from their output folders and checks them; unusable runs are left out, with the reason."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hvd_bert.errors import UserError
from hvd_bert.monitoring import PHASES
from hvd_bert.rendering.text import visible
from hvd_bert.storage.reading import parse_json, read_json, read_text, read_yaml
from hvd_bert.tools.runs.run import LeftOut, Row, Run

RESULTS, METRICS, SETTINGS, SCORES = "train_results.json", "metrics.jsonl", "train_config.yaml", "eval_results.json"
EVALUATED_ONLY = "eval_config.yaml"
SWEEP = "sweep.json"  # `hvd-bert bench sweep` writes it to the folder above its runs
# Keys of the record `work` that are not compared: those that differ between repeats, those that the number of steps
# covers, and those of the strategy, which only change how the same gradients are sent.
REPEATED = ("--seed",)
IN_STEPS = ("--num_train_epochs", "--max_steps")
OF_THE_STRATEGY = ("--fp16_allreduce", "--gradient_predivide_factor")
LARGEST = 1e300
MAX_DIGITS = 16  # of a number of weights
MAX_METRICS = 2**32  # bytes: millions of lines
# For runs of older versions, which did not record the number of weights whose gradients come last: parts of the names
# of embeddings, and of ALBERT's layers, which share their weights.
LATE = ("embed", "emb_ln", "albert_layer_groups")


class Unusable(Exception):
    """A run cannot be part of a report; the message is the reason."""


def find(paths: Sequence[Path]) -> list[Path]:
    """The run folders among `paths` and below them, without duplicates. Raises UserError if there are none."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder. Name output folders of `python -m hvd_bert.train`.")
        below = sorted(_below(path))
        if not below:
            raise UserError(
                f"{path} contains no run: there is no {RESULTS} or {SETTINGS} in it or in a folder below it."
                " Name output folders of `python -m hvd_bert.train`."
            )
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _below(path: Path) -> Iterable[Path]:
    for folder, subfolders, files in os.walk(path):
        if {RESULTS, SETTINGS, METRICS, EVALUATED_ONLY} & set(files):
            subfolders.clear()  # checkpoints and other subfolders belong to the run
            yield Path(folder)


def read_all(folders: Sequence[Path], unrun: Mapping[Path, LeftOut] | None = None) -> tuple[list[Run], list[LeftOut]]:
    """The usable runs in `folders`, and those left out; `unrun`: runs for which a sweep recorded the reason."""
    runs, left_out = [], list(dict.fromkeys((unrun or {}).values()))
    for folder in folders:
        if unrun and folder in unrun:
            continue
        try:
            runs.append(read(folder))
        except Unusable as error:
            left_out.append(LeftOut(str(folder), str(error)))
    return runs, left_out


def unrun(paths: Sequence[Path]) -> dict[Path, LeftOut]:
    """Runs that a sweep in or below `paths` skipped or that failed: folder (it may not exist) -> run and reason."""
    found: dict[Path, LeftOut] = {}
    for path in paths:
        for folder, subfolders, files in os.walk(path):
            if {RESULTS, SETTINGS, METRICS} & set(files):
                subfolders.clear()
            if SWEEP in files:
                found |= _unrun_of(Path(folder))
    return found


def _unrun_of(folder: Path) -> dict[Path, LeftOut]:
    try:
        points = _Record(SWEEP, _load(folder / SWEEP)).sequence("points")
    except Unusable as error:
        return {folder / SWEEP: LeftOut(str(folder), str(error))}
    missing = [point for point in points if isinstance(point, dict) and point.get("state") in ("skipped", "failed")]
    together: dict[tuple[str, str], list[str]] = {}
    for point in missing:
        why = f"{point['state']}: {str(point.get('reason') or 'no reason is recorded').rstrip('.')}"
        together.setdefault((str(point.get("strategy")), why), []).append(str(point.get("name")))
    return {
        folder / name: LeftOut(f"{strategy} ({', '.join(names)} of {folder})", why)
        for (strategy, why), names in together.items()
        for name in names
    }


def read(folder: Path) -> Run:
    """Read the run in a folder. Raises Unusable."""
    if not (folder / RESULTS).exists():
        trained = (folder / SETTINGS).exists() or (folder / METRICS).exists()
        raise Unusable(f"not finished: it has no {RESULTS}" if trained else "evaluated only, not trained")
    results = _Record(RESULTS, _load(folder / RESULTS))
    work = results.mapping("work")
    if not work:
        raise Unusable(f"its {RESULTS} has no `work`: it was written by an older version")
    ranks = results.count("world_size")
    devices = ranks * (results.count("devices_per_rank") if "devices_per_rank" in results.values else 1)
    processes = _processes(results)
    scores = _Record(SCORES, _load(folder / SCORES)) if os.path.lexists(folder / SCORES) else None
    # A task may have none, and older runs of question answering do not name theirs.
    names = list(map(str, results.sequence("scores") if "scores" in results.values else ["exact_match", "f1"]))
    settings = settings_of(folder / SETTINGS)
    strategy = visible(str(results.values.get("strategy") or "horovod"))
    variant = {name: work[name] for name in OF_THE_STRATEGY if name in work}
    variant |= {"--num_groups": str(settings.get("num_groups") or 0)} if strategy == "horovod" else {}
    variant |= {"--zero_stage": str(settings.get("zero_stage"))} if strategy == "deepspeed" else {}
    places = results.values.get("ranks") or [{}]
    parameters, late = _parameters(folder, work)
    if "late_parameters" in results.values:
        late = results.count("late_parameters", minimum=0)
    return Run(
        name=str(folder),
        strategy=strategy,
        variant=variant | {"controller": visible(str(results.values.get("controller")))},
        nodes=max(1, len(results.sequence("hosts"))),
        ranks=ranks,
        devices=devices,
        global_batch=results.count("global_batch"),
        steps=results.count("train_steps"),
        windows=results.count("train_samples"),
        learning_rate=results.number("learning_rate"),
        seed=results.count("seed", minimum=0),
        without_dropout=work.get("--dropout") in ("0", "0.0"),
        work={name: value for name, value in work.items() if name not in (*REPEATED, *IN_STEPS, *OF_THE_STRATEGY)},
        device_name=visible(str(results.values.get("device_name"))),
        on_cpu=isinstance(places, list) and isinstance(places[0], dict) and places[0].get("device") == "cpu",
        threads=results.count("threads_per_rank"),
        versions=results.mapping("versions"),
        rows=_rows(folder / METRICS),
        runtime_s=results.number("train_runtime"),
        real_s=_median(processes, "real_s"),
        user_s=_median(processes, "user_s"),
        system_s=_median(processes, "system_s"),
        memory_bytes=max((p["memory_peak_bytes"] for p in processes if "memory_peak_bytes" in p), default=None),
        scores={name: scores.number(name) if scores else None for name in names},
        unit=str(results.values.get("unit", "windows")),
        passes=_passes(settings, results.count("global_batch") / devices),
        parameters=parameters,
        late_parameters=late,
    )


class _Record:
    """A JSON object of a run; reading a value of the wrong type or range raises Unusable."""

    def __init__(self, file: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise Unusable(f"{file} is damaged: not a JSON object")
        self.file, self.values = file, values

    def number(self, key: str) -> float:
        """A finite number."""
        value = self.values.get(key)
        # A comparison instead of math.isfinite, since a whole number may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -LARGEST < value < LARGEST:
            raise Unusable(f"{self.file} is damaged: {key} is {str(value)[:50]}, not a number")
        return float(value)

    def count(self, key: str, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self.number(key)
        if value != int(value) or value < minimum:
            raise Unusable(f"{self.file} is damaged: {key} is {value:g}")
        return int(value)

    def sequence(self, key: str) -> list[Any]:
        """A list; empty if it is missing."""
        value = self.values.get(key)
        return value if isinstance(value, list) else []

    def mapping(self, key: str) -> dict[str, str]:
        """An object's values as text; empty if it is missing."""
        value = self.values.get(key)
        return (
            {visible(str(name)): visible(str(item)) for name, item in value.items()} if isinstance(value, dict) else {}
        )


def _load(path: Path) -> Any:
    try:
        return read_json(path)
    except OSError as error:
        raise Unusable(f"{path.name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise Unusable(f"{path.name} is damaged: not valid JSON ({error})") from None


def _rows(path: Path) -> tuple[Row, ...]:
    """The lines of the steps: at least two, in increasing order of steps. Raises Unusable."""
    try:
        lines = read_text(path, MAX_METRICS).split("\n")
    except (OSError, ValueError) as error:
        raise Unusable(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows: list[Row] = []
    if not lines[-1]:  # after the last line's end
        lines.pop()
    for number, line in enumerate(lines, start=1):
        where = f"{path.name}, line {number},"
        try:
            record = _Record(where, parse_json(line))
        except ValueError as error:
            raise Unusable(f"{where} is damaged: not valid JSON ({error})") from None
        if any(key.startswith("eval_") for key in record.values):
            continue
        numbers = {key: record.number(key) for key in ("loss", "windows_per_s", "step_s")}
        phases = {name: record.number(f"{name}_s") for name in PHASES if f"{name}_s" in record.values}
        row = Row(step=record.count("step"), phases=phases, **numbers)
        if rows and row.step <= rows[-1].step:
            raise Unusable(f"{where} is damaged: step {row.step} comes after step {rows[-1].step}")
        if row.step_s <= 0 or row.windows_per_s <= 0:
            raise Unusable(f"{where} is damaged: a step took {row.step_s:g} s, at {row.windows_per_s:g} windows/s")
        rows.append(row)
    if len(rows) < 2:
        raise Unusable(f"{path.name} has {len(rows)} line(s) of steps, but the first is warm-up: lower --logging_steps")
    return tuple(rows)


def _processes(results: _Record) -> list[dict[str, float]]:
    """Time and memory of each rank's process, as far as recorded."""
    processes = []
    for item in results.sequence("processes"):
        record = _Record(f"{RESULTS}, processes,", item)
        keys = ("real_s", "user_s", "system_s", "memory_peak_bytes")
        processes.append({key: record.number(key) for key in keys if record.values.get(key) is not None})
    return processes


def _median(processes: Sequence[Mapping[str, float]], key: str) -> float | None:
    values = [process[key] for process in processes if key in process]
    return statistics.median(values) if values else None


def settings_of(path: Path) -> dict[str, Any]:
    """A run's flags; empty if their file is missing or damaged, since no comparison depends on them."""
    try:
        settings = read_yaml(path)
    except (OSError, ValueError):
        return {}
    return {str(name): value for name, value in settings.items()} if isinstance(settings, dict) else {}


def _passes(settings: Mapping[str, Any], windows: float) -> int:
    """Micro-batches per step of a device that takes `windows` per step."""
    batch = settings.get("per_device_train_batch_size")
    return math.ceil(windows / batch) if isinstance(batch, int) and batch > 0 else 1


def _parameters(folder: Path, work: Mapping[str, str]) -> tuple[int | None, int]:
    """The number of weights, and of those whose gradients come last (`LATE`).

    From the saved model; without one, from the record `work`.
    """
    try:
        with safe_open(folder / "model.safetensors", framework="numpy") as file:
            sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        return sum(sizes.values()), sum(size for name, size in sizes.items() if any(part in name for part in LATE))
    except (OSError, SafetensorError):
        pass
    words = work.get("the model", "").split()
    count = words[words.index("parameters,") - 1].replace(",", "") if "parameters," in words else ""
    return (int(count), 0) if count.isdecimal() and len(count) < MAX_DIGITS else (None, 0)
