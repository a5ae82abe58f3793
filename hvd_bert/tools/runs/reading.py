"""Finished runs, read from their output folders and checked. Unusable ones are left out, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import asdict

from hvd_bert.config.settings import of_this_version
from hvd_bert.errors import UserError, visible
from hvd_bert.storage.reading import MAX_YAML_BYTES, Kind, convert, parse_json, read_json, read_text
from hvd_bert.tools.runs.run import LeftOut, Number, Results, Row, Run, SweepFile

RESULTS, METRICS, SETTINGS, SCORES = "train_results.json", "metrics.jsonl", "train_config.yaml", "eval_results.json"
EVALUATED_ONLY = "eval_config.yaml"
RUN_FILES = {RESULTS, SETTINGS, METRICS, EVALUATED_ONLY}
SWEEP = "sweep.json"  # `hvd-bert bench sweep` writes it to the folder above its runs
# Keys of the record `work` that are not compared: those that differ between repeats, those that the number of steps
# covers, and those of the strategy, which only change how the same gradients are sent.
REPEATED = ("--seed",)
IN_STEPS = ("--num_train_epochs", "--max_steps")
OF_THE_STRATEGY = ("--fp16_allreduce",)
MAX_METRICS = 2**32  # bytes: millions of lines


class Unusable(Exception):
    """A run cannot be part of a report; the message is the reason."""


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
        for folder, files in _walk(path):
            if SWEEP in files:
                found |= _unrun_of(folder)
    return found


def _unrun_of(folder: Path) -> dict[Path, LeftOut]:
    try:
        points = _converted(SWEEP, _load(folder / SWEEP), SweepFile).points
    except Unusable as error:
        return {folder / SWEEP: LeftOut(str(folder), str(error))}
    together: dict[tuple[str, str], list[str]] = {}
    for point in points:
        if point.state in ("skipped", "failed"):
            why = f"{point.state}: {(point.reason or 'no reason is recorded').rstrip('.')}"
            together.setdefault((point.strategy, why), []).append(point.name)
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
    values = _load(folder / RESULTS)
    if isinstance(values, dict) and not values.get("work"):
        raise Unusable(f"its {RESULTS} has no `work`: it was written by an older version")
    results = _converted(RESULTS, values, Results)
    work, settings = _texts(of_this_version(results.work)), settings_of(folder / SETTINGS)
    results.strategy, results.device_name = visible(results.strategy), visible(results.device_name)
    variant = {name: work[name] for name in OF_THE_STRATEGY if name in work}
    variant |= {"--num_groups": str(settings.get("num_groups") or 0)} if results.strategy == "horovod" else {}
    variant |= {"--zero_stage": str(settings.get("zero_stage"))} if results.strategy == "deepspeed" else {}
    results.work = {name: work[name] for name in work if name not in (*REPEATED, *IN_STEPS, *OF_THE_STRATEGY)}
    results.versions = _texts(results.versions)
    return Run(
        **asdict(results),
        name=str(folder),
        variant=variant | {"controller": visible(str(results.controller))},
        without_dropout=work.get("--dropout") in ("0", "0.0")
        and work.get("--attention_dropout") in ("0", "0.0", "None"),
        rows=_rows(folder / METRICS),
        scores=_scores(folder / SCORES, results.score_names),
    )


def _converted(file: str, value: Any, kind: type[Kind]) -> Kind:
    try:
        return convert(value, kind)
    except ValueError as error:
        raise Unusable(f"{file} is damaged: {error}") from None


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {visible(name): visible(str(value)) for name, value in values.items()}


def _scores(path: Path, names: Sequence[str]) -> dict[str, float | None]:
    if not os.path.lexists(path):
        return dict.fromkeys(names)
    values = _converted(path.name, _load(path), dict[str, Any])
    return {name: _converted(f"{path.name}, {name},", values.get(name), Number) for name in names}


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
    for number, text in enumerate(lines, start=1):
        where = f"{path.name}, line {number},"
        try:
            values = parse_json(text)
        except ValueError as error:
            raise Unusable(f"{where} is damaged: not valid JSON ({error})") from None
        if isinstance(values, dict) and any(key.startswith("eval_") for key in values):
            continue
        row = _converted(where, values, Row)
        if rows and row.step <= rows[-1].step:
            raise Unusable(f"{where} is damaged: step {row.step} comes after step {rows[-1].step}")
        rows.append(row)
    if len(rows) < 2:
        raise Unusable(f"{path.name} has {len(rows)} line(s) of steps, but the first is warm-up: lower --logging_steps")
    return tuple(rows)


def settings_of(path: Path) -> dict[str, Any]:
    """A run's flags; empty if their file is missing or damaged, since no comparison depends on them."""
    try:
        settings = yaml.safe_load(read_text(path, MAX_YAML_BYTES))
    except (OSError, ValueError, yaml.YAMLError, RecursionError, OverflowError):
        return {}
    return {str(name): value for name, value in settings.items()} if isinstance(settings, dict) else {}
