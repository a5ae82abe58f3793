"""A rank of `hvd-bert bench goodput`, and where the time of a training went, from the notes of its ranks.

python -m hvd_bert.tools.bench.noted NOTES.jsonl TRAINER'S FLAGS
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.config import command_line
from hvd_bert.output.callback import Callback
from hvd_bert.startup import start_rank
from hvd_bert.storage.writing import JsonLines
from hvd_bert.training import api

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World
    from hvd_bert.tasks.base import Task

USEFUL, DETECTION, RESTART, REPEATED = PARTS = ("useful_s", "detection_s", "restart_s", "repeated_s")
LOST = {DETECTION: "detection", RESTART: "restart", REPEATED: "repeated steps"}


class Notes(Callback):
    """A file in which each rank notes its start and its failure, and rank 0 of each world the begin and the steps."""

    def __init__(self, path: Path) -> None:
        self._lines, self._writes = JsonLines(path), False
        self.add("started")

    def add(self, what: str, **values: Any) -> None:
        """A line of the file, with the time by this host's clock that is never set."""
        self._lines.write({"time": time.monotonic(), "what": what, **values})

    def on_start(self, task: Task, world: World) -> None:
        self._writes = world.rank == 0
        if self._writes and task.plan:
            self.add("begin", ranks=world.size, windows=task.plan.num_windows)

    def on_step(self, step: int) -> None:
        if self._writes:
            self.add("step", step=step)

    def main(self, world: World) -> None:
        """A whole run on one rank."""
        try:
            api.run(None, world, [self])
        except Exception:
            self.add("noticed", rank=world.rank)  # most likely that another rank is lost
            raise


def read(path: Path) -> list[dict[str, Any]]:
    """The notes in the order of time, without a line that is being written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: note["time"])


class Account:
    """Sorts the time from the first step's begin on into PARTS, in all (`spent`) and after each kill (`kills`).

    The time of a step is useful if it is the first of its number; that of a step that a kill cut off is repeated. A
    kill is being detected until a rank or the launcher fails; a step that the others finish until then counts.
    """

    def __init__(self, notes: Sequence[Mapping[str, Any]], global_batch: int, duration_s: float) -> None:
        """`notes`: of the ranks, with "kill" and "ended" (the launcher); those after `duration_s` do not count."""
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.kills: list[dict[str, Any]] = []
        self.step = self.windows = 0  # the last step, and the windows up to it
        first = next(note for note in notes if note["what"] == "begin")
        self._epoch, self._global_batch = first["windows"], global_batch
        self.start = self.last_step = self._last = first["time"]
        self._now, self._cut_at = RESTART, 0.0
        for note in notes:
            if self.start <= note["time"] <= self.start + duration_s:
                getattr(self, f"_{note['what']}")(note["time"], note)
        self._fail(self.start + duration_s)

    def _spend(self, part: str, until: float) -> None:
        for sums in (self.spent, *self.kills[-1:]):
            sums[part] += until - self._last
        self._last = until

    def _fail(self, at: float) -> None:
        """End what is going on, at a failure or at the end."""
        if self._now == DETECTION:
            self._spend(REPEATED, self._cut_at)
        self._spend(self._now, at)

    def _begin(self, at: float, note: Mapping[str, Any]) -> None:
        self._started(at, note)
        self._spend(RESTART, at)
        self._now = USEFUL

    def _step(self, at: float, note: Mapping[str, Any]) -> None:
        again = note["step"] <= self.step
        self._spend(REPEATED if again else USEFUL, at)
        for step in range(self.step, note["step"]):
            done = step % math.ceil(self._epoch / self._global_batch) * self._global_batch
            self.windows += min(self._global_batch, self._epoch - done)
        self.step, self.last_step, self._cut_at = max(self.step, note["step"]), at, at
        if self.kills and self._now == USEFUL:
            self.kills[-1]["repeated_steps"] += again
            self.kills[-1].setdefault("next_step_s", at - self.start - self.kills[-1]["at_s"])

    def _kill(self, at: float, note: Mapping[str, Any]) -> None:
        if self._now != USEFUL:
            self._fail(at)
        self.kills.append({"at_s": at - self.start, "repeated_steps": 0, **dict.fromkeys(PARTS, 0.0)})
        self._now, self._cut_at = DETECTION, at

    def _started(self, at: float, note: Mapping[str, Any]) -> None:
        if self._now == DETECTION:
            self._noticed(at, note)

    def _noticed(self, at: float, note: Mapping[str, Any]) -> None:
        if self._now == DETECTION:
            self._fail(at)
        self._now = RESTART

    _ended = _noticed


if __name__ == "__main__":
    start_rank(Notes(Path(sys.argv.pop(1))).main, command_line.parse)
