"""sweep.json: the plan of a sweep and the result of each point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_bert.tools.runs.finding import SWEEP
from hvd_bert.tools.runs.launching import Point
from hvd_bert.tools.runs.out_folder import read_previous, replace

WAITING, DONE, FAILED, SKIPPED = "waiting", "done", "failed", "skipped"
STATES = (DONE, SKIPPED, FAILED, WAITING)


@dataclass
class Result:
    """The result of a point: state, reason for a failure or skip, wall time and throughput."""

    state: str = WAITING
    reason: str = ""
    seconds: float | None = None
    windows_per_s: float | None = None
    command: Sequence[str] = ()


@dataclass
class SweepRecord:
    """The content of the file. `same`: settings that must not change when a sweep resumes; `now`: facts that may."""

    folder: Path
    same: dict[str, Any]
    now: dict[str, Any]
    results: dict[Point, Result] = field(default_factory=dict)
    other_rows: dict[str, Any] = field(default_factory=dict)  # of points that this plan does not name

    def begin(self, points: Sequence[Point]) -> None:
        """Resume from the folder's file, or start a new one. Raises UserError if the file is of a different sweep.

        Strategies, ranks, repeats and kinds of scaling may be added. Rows of points not in `points` stay.
        """
        previous = read_previous(self.folder / SWEEP, self.same, "sweep")
        earlier = {row["name"]: row for row in previous.get("points", [])}
        self.same = previous.get("same", {}) | self.same
        for point in points:
            row = earlier.pop(point.name, {})
            self.results[point] = Result(seconds=row.get("seconds"), command=row.get("command", ()))
        self.other_rows = earlier

    def write(self) -> None:
        """Write the file atomically. Raises UserError if it cannot be written."""
        names = ("name", "strategy", "ranks", "scaling", "repeat", "global_batch")
        rows = [{name: getattr(point, name) for name in names} | vars(result) for point, result in self.results.items()]
        content = {"same": self.same, **self.now, "points": rows + list(self.other_rows.values())}
        replace(self.folder / SWEEP, content)

    def with_state(self, state: str) -> dict[Point, Result]:
        """The points in a state."""
        return {point: result for point, result in self.results.items() if result.state == state}

    def expected_s(self, point: Point) -> float | None:
        """Expected wall time of a point: the mean of its repeats, else of all runs; None before the first run."""
        ran = {other: result.seconds for other, result in self.results.items() if result.seconds is not None}
        like = [seconds for other, seconds in ran.items() if other.setting == point.setting] or list(ran.values())
        return sum(like) / len(like) if like else None
