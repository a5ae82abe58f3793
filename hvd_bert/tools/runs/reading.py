"""Finished runs whose speeds can be compared. Others are left out, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict

from hvd_bert.config.settings import of_this_version
from hvd_bert.errors import UserError, visible
from hvd_bert.storage.reading import convert, read_json
from hvd_bert.tools.runs import record as records
from hvd_bert.tools.runs.record import EVALUATED_ONLY, METRICS, RESULTS, SETTINGS, Record, number_of
from hvd_bert.tools.runs.run import LeftOut, Results, Run, SweepFile

RUN_FILES = {RESULTS, SETTINGS, METRICS, EVALUATED_ONLY}
SWEEP = "sweep.json"  # `hvd-bert bench sweep` writes it to the folder above its runs
# Keys of the record `work` that are not compared: those that differ between repeats, those that the number of steps
# covers, and those of the strategy, which only change how the same gradients are sent.
REPEATED = ("--seed",)
IN_STEPS = ("--num_train_epochs", "--max_steps")
OF_THE_STRATEGY = ("--fp16_allreduce",)


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


def comparable(
    records: Sequence[Record], unrun: Mapping[Path, LeftOut] | None = None
) -> tuple[list[Run], list[LeftOut]]:
    """The usable runs among `records`, and those left out; `unrun`: runs for which a sweep recorded the reason."""
    runs, left_out = [], list(dict.fromkeys((unrun or {}).values()))
    for record in records:
        if unrun and Path(record.name) in unrun:
            continue
        try:
            runs.append(run_of(record))
        except Unusable as error:
            left_out.append(LeftOut(record.name, str(error)))
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
        points = convert(read_json(folder / SWEEP), SweepFile).points
    except (OSError, ValueError) as error:
        reason = f"{SWEEP} cannot be read: {getattr(error, 'strerror', None) or error}"
        return {folder / SWEEP: LeftOut(str(folder), reason)}
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
    return run_of(records.read(folder))


def run_of(record: Record) -> Run:
    """A run whose speed can be compared. Raises Unusable."""
    damaged = [problem for problem in record.problems if problem.startswith((RESULTS, METRICS))]
    if damaged:
        raise Unusable(damaged[0])
    if record.state != "finished" or not record.trained:
        raise Unusable(f"not finished: it has no {RESULTS}" if record.trained else "evaluated only, not trained")
    if not record.facts.get("work"):
        raise Unusable(f"its {RESULTS} has no `work`: it was written by an older version")
    try:
        results = convert(record.facts, Results)
    except ValueError as error:
        raise Unusable(f"{RESULTS} is damaged: {error}") from None
    work, settings, lines = _texts(of_this_version(results.work)), record.settings, record.steps
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
    return Run(
        **asdict(results),
        name=record.name,
        variant=variant | {"controller": visible(str(results.controller))},
        without_dropout=work.get("--dropout") in ("0", "0.0")
        and work.get("--attention_dropout") in ("0", "0.0", "None"),
        lines=lines,
        scores={name: number_of(record.scores.get(name)) for name in results.score_names},
    )


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {visible(name): visible(str(value)) for name, value in values.items()}
