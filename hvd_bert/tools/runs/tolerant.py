"""Read values and files that may be missing, damaged or still being written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.storage.reading import Kind, convert, parse_json, read_json, read_text

MAX_BYTES = 2**32  # maximum bytes of a JSON Lines file
MAX_STEP = 2**53  # floats represent all whole numbers up to 2**53 exactly
LARGEST = 1e300  # larger numbers count as missing, so that sums do not overflow


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

    def mean(self, key: str, by_time: bool = False) -> float:
        """Return the mean of the known values after the first line, which is warm-up; NaN if there are none.

        The weight of a line is the number of steps since the line before or, with `by_time`, their time.
        """
        values, weights = self[key][1:], np.diff(self["step"])
        weights = self["step_s"][1:] * weights if by_time else weights
        known = np.isfinite(values) & (weights > 0)
        return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan

    def where(self, key: str, value: float) -> LineArrays:
        """Select the lines in which `key` has the value `value`."""
        chosen = self[key] == value
        return LineArrays({name: column[chosen] for name, column in self.columns.items()})


def columns(lines: Sequence[Mapping[str, Any]]) -> LineArrays:
    """Make one array per key from JSON objects, with NaN where an object has no number for the key."""
    keys = dict.fromkeys(key for line in lines for key in line)
    return LineArrays({key: np.array([finite_number(line.get(key)) for line in lines], np.float64) for key in keys})


def converted(value: Any, kind: type[Kind], default: Kind) -> Kind:
    """Return the value, or `default` if the value does not have the type `kind`, as in a damaged file."""
    try:
        return convert(value, kind)
    except ValueError:
        return default


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the JSON objects in a list; empty if `value` is not a list."""
    return [entry for entry in converted(value, list[Any], []) if isinstance(entry, dict)]


def finite_number(value: Any) -> float | None:
    """Return the value if it is a finite number whose magnitude is below LARGEST, else None."""
    finite = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if finite else None


def unreadable(path: Path, error: Exception) -> str:
    """Describe why a file cannot be read."""
    return f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}"


def load(path: Path, problems: list[str], kind: type[Kind]) -> Kind:
    """Read an object or list from a JSON file; empty if the file is missing, damaged or has another type.

    Adds a file that cannot be read to `problems`.
    """
    try:
        return converted(read_json(path), kind, kind())
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            problems.append(unreadable(path, error))
        return kind()


def read_lines(path: Path, problems: list[str]) -> Iterator[Any]:
    """Read the values of a JSON Lines file. Adds one entry to `problems` if the file or any of its lines is damaged.

    An incomplete last line is not a problem.
    """
    try:
        lines = read_text(path, MAX_BYTES, "replace").split("\n")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        problems.append(unreadable(path, error))
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


def read_metrics(path: Path, problems: list[str]) -> tuple[LineArrays, LineArrays]:
    """Read metrics.jsonl. Returns the lines of steps and the lines of evaluations.

    Lines of steps whose numbers do not increase are left out, and counted in `problems`. Evaluations of step 0 are of
    commands that do not train: the last one counts, and none after steps, since its data or rules may differ.
    """
    steps: list[Mapping[str, Any]] = []
    evaluations: list[Mapping[str, Any]] = []
    left_out = 0
    for line in read_lines(path, problems):
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            continue
        evaluated = any(key.startswith("eval_") for key in line)
        if evaluated and not line["step"]:
            if steps:
                continue
            evaluations.clear()
        first = steps[-1]["step"] + 1 if steps and not evaluated else 0
        if first <= line["step"] < MAX_STEP:
            (evaluations if evaluated else steps).append(line)
        else:
            left_out += 1
    if left_out:
        problems.append(f"{path.name}: lines without a step that increases are left out ({left_out})")
    return columns(steps), columns(evaluations)
