"""Find the folders of runs, and the reasons why runs of sweeps failed or were skipped."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from hvd_bert.errors import UserError
from hvd_bert.storage.reading import convert, read_json
from hvd_bert.tools.runs.record import EVALUATED_ONLY, METRICS, RESULTS, SETTINGS, Number
from hvd_bert.tools.runs.tolerant import unreadable

MARKS = {RESULTS, SETTINGS, METRICS, EVALUATED_ONLY}
SWEEP = "sweep.json"  # `hvd-bert bench sweep` writes it to the folder above its runs
Excluded = tuple[str, str]  # name of one or more runs, and the reason why they have no speed-up


class SweepRow(Struct):
    """A point in sweep.json, with the fields that are read back."""

    name: str
    strategy: str = ""
    state: str = ""
    reason: str = ""
    seconds: Number | None = None
    command: list[str] = []


class SweepFile(Struct):
    """The content of sweep.json."""

    same: dict[str, Any]
    command: list[str] = []
    points: list[SweepRow] = []


def find(paths: Sequence[Path]) -> list[Path]:
    """Find the run folders among and below `paths`, without duplicates. Raises UserError for a path without runs."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder. Name output folders of `python -m hvd_bert.train`.")
        below = sorted(folder for folder, files in _walk(path) if MARKS & files)
        if not below:
            raise UserError(
                f"{path} contains no run: there is no {RESULTS} or {SETTINGS} in it or in a folder below it."
                " Name output folders of `python -m hvd_bert.train`."
            )
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _walk(path: Path) -> Iterable[tuple[Path, set[str]]]:
    """Walk over a folder and its subfolders. Yields each with the names of its files."""
    for folder, subfolders, files in os.walk(path):
        if MARKS & set(files):
            subfolders.clear()  # checkpoints and other subfolders belong to the run
        yield Path(folder), set(files)


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the paths relative to the folder that contains all of them."""
    absolute = [os.path.abspath(path) for path in paths]
    above = os.path.commonpath(map(os.path.dirname, absolute)) if absolute else ""
    return [os.path.relpath(path, above) for path in absolute]


def sweeps(paths: Sequence[Path]) -> tuple[list[str], dict[Path, Excluded]]:
    """Read the sweeps in or below `paths`. Returns their last commands, and the excluded runs by folder.

    Excluded are runs that failed or were skipped. A sweep.json that cannot be read is also an entry.
    """
    commands, excluded = [], {}
    for folder in (folder for path in paths for folder, files in _walk(path) if SWEEP in files):
        try:
            sweep = convert(read_json(folder / SWEEP), SweepFile)
        except (OSError, ValueError) as error:
            excluded[folder / SWEEP] = str(folder), unreadable(folder / SWEEP, error)
            continue
        commands += [shlex.join(sweep.command)] if sweep.command else []
        together: dict[tuple[str, str], list[str]] = {}
        for point in sweep.points:
            if point.state in ("skipped", "failed"):
                why = f"{point.state}: {(point.reason or 'no reason is recorded').rstrip('.')}"
                together.setdefault((point.strategy, why), []).append(point.name)
        for (strategy, why), names in together.items():
            entry = (f"{strategy} ({', '.join(names)} of {folder})", why)
            excluded |= {folder / name: entry for name in names}
    return commands, excluded
