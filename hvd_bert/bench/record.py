"""sweep.json: the plan of a sweep, and what became of each of its points."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_bert.bench.points import Point
from hvd_bert.errors import UserError
from hvd_bert.storage import locks
from hvd_bert.storage.writing import write_json

FILE = "sweep.json"
LOCK = ".lock"
WAITING, DONE, FAILED, SKIPPED = "waiting", "done", "failed", "skipped"
STATES = (DONE, SKIPPED, FAILED, WAITING)


@dataclass
class Result:
    """What became of a point: its state, why it failed or was skipped, seconds from its start to its end, its speed."""

    state: str = WAITING
    reason: str = ""
    seconds: float | None = None
    windows_per_s: float | None = None
    command: Sequence[str] = ()


@dataclass
class Record:
    """The file, and what it holds. `same`: what must not change between two starts of a sweep in one folder."""

    folder: Path
    same: dict[str, Any]
    now: dict[str, Any]
    results: dict[Point, Result] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)  # of points of an earlier plan

    def begin(self, points: Sequence[Point]) -> None:
        """Take over what an earlier start left of `points`, or begin anew. Raises UserError where it was another sweep.

        Strategies, ranks, repeats and kinds of scaling may be added; points that are not named now stay as they are.
        """
        held = take_up(self.folder, FILE, self.same, "sweep")
        try:
            earlier = {row["name"]: row for row in held["points"]} if held else {}
        except (KeyError, TypeError):
            raise unreadable(self.folder / FILE) from None
        self.same = held.get("same", {}) | self.same
        for point in points:
            row = earlier.pop(point.name, {})
            self.results[point] = Result(seconds=row.get("seconds"), command=row.get("command", ()))
        self.kept = earlier

    def write(self) -> None:
        """Write the file; a crash leaves the old one or the new one. Raises UserError where it cannot be written."""
        rows = [
            {
                "name": point.name,
                "strategy": point.strategy,
                "ranks": point.ranks,
                "scaling": point.scaling,
                "repeat": point.repeat,
                "global_batch": point.global_batch,
                **vars(result),
                "command": list(result.command),
            }
            for point, result in self.results.items()
        ]
        content = {"same": self.same, **self.now, "points": rows + list(self.kept.values())}
        replace(self.folder / FILE, content)

    def of_state(self, state: str) -> dict[Point, Result]:
        """The points in a state."""
        return {point: result for point, result in self.results.items() if result.state == state}

    def expected_s(self, point: Point) -> float | None:
        """How long a point will take by its repeats or, where none has run, by all that ran; None: none did."""
        ran = {other: result.seconds for other, result in self.results.items() if result.seconds is not None}
        like = [seconds for other, seconds in ran.items() if other.setting == point.setting] or list(ran.values())
        return sum(like) / len(like) if like else None


def take_up(folder: Path, file: str, same: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What an earlier start of `what` left in `folder`/`file`, {} where there was none.

    `same`: what must be as it was then, by what to call it; the file has it under "same". Raises UserError where it is
    not, and where the folder holds other things.
    """
    path = folder / file
    if not path.exists():
        if folder.is_dir() and any(entry.name != LOCK for entry in folder.iterdir()):
            raise UserError(f"--out {folder} is not empty, and holds no {file}: name another folder.")
        return {}
    try:
        held: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
        before = dict(held["same"])
    except (OSError, ValueError, KeyError, TypeError):
        raise unreadable(path) from None
    differing = [
        f"{name} was {_shown(before[name])} and is {_shown(value)}"
        for name, value in same.items()
        if name in before and before[name] != value
    ]
    if differing:
        raise UserError(
            f"--out {folder} holds a {what} of other runs: {'; '.join(differing)}. Give what it was begun with, or name"
            " another --out."
        )
    return held


def unreadable(path: Path) -> UserError:
    """What to say of a record that is none."""
    return UserError(f"{path} cannot be read as a record of runs: name another --out.")


def replace(path: Path, content: Any) -> None:
    """Write JSON; a crash leaves the old file or the new one. Raises UserError where it cannot be written."""
    with writing(path.parent):
        write_json(path, content)


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return (shlex.join(value) or "(none)") if isinstance(value, list) else str(value)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises UserError where files of an --out cannot be written inside. Nothing else belongs there: it would be
    blamed on the folder."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror or error}.") from None


@contextmanager
def locked(folder: Path, wait: bool) -> Iterator[None]:
    """Hold a folder's lock; a run's folder is locked by the run.

    Raises UserError, or waits, if another process has it.
    """
    try:
        lock = locks.take(folder / LOCK, wait=False)
    except locks.InUse as error:
        if not wait:
            raise UserError(
                f"--out {folder} is in use by another command ({error.holder}): wait for its end."
            ) from None
        print(f"{folder} is still in use ({error.holder}): waiting for its end", flush=True)
        lock = locks.take(folder / LOCK, wait=True)
    with lock:
        if lock.missing:
            warning = f"{folder} has no file locks ({lock.missing}): do not start a command in it on another host."
            print(warning, file=sys.stderr)
        yield
