"""events.jsonl in a run's folder: each start with its environment, warnings, and the reason if a run ends early.

Rank 0 writes it. Another rank adds the reason why it ends, if it sees the same folder.
"""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_bert.storage.reading import open_regular, parse_json
from hvd_bert.storage.writing import JsonLines

NAME = "events.jsonl"
_MAX_EARLY = 100


class Events:
    """The file of a run. Before `begin`, a process has none: what it adds is written then."""

    def __init__(self) -> None:
        self._early: list[dict[str, Any]] = []
        self._path: Path | None = None
        self._file: JsonLines | None = None

    def begin(self, folder: Path, writes: bool, facts: dict[str, Any]) -> None:
        """A run starts in its folder. `writes`: on rank 0. Raises OSError."""
        self.end()
        self._path = folder / NAME
        if writes:
            self._file = JsonLines(self._path)
            self._file.write(*self._early)
            self.add("start", command=command(), **facts)
        self._early.clear()  # rank 0 has those of other ranks that it logged for all

    def add(self, event: str, **values: Any) -> None:
        """Record an event."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        if self._file is not None:
            self._file.write(line)
        elif self._path is None and len(self._early) < _MAX_EARLY:
            self._early.append(line)

    def failed(self, reason: str) -> None:
        """Record why this rank ends early, if it is in a run."""
        with suppress(OSError):
            if self._file is None and self._path is not None and self._path.exists():  # rank 0's
                self._file = JsonLines(self._path)
            if self._file is not None:
                self.add("end", message=reason)

    def end(self) -> None:
        """The run has ended as planned."""
        if self._file is not None:
            self._file.close()
        self._file = self._path = None


_events = Events()
begin, add, failed, end = _events.begin, _events.add, _events.failed, _events.end


def command() -> str:
    """The command line of this process."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def job_commands(folder: Path, job: str) -> list[str]:
    """The commands of the runs that a Slurm job has started in a folder."""
    found = []
    with suppress(OSError), open_regular(folder / NAME) as lines:
        for line in lines:
            with suppress(ValueError, LookupError, TypeError):  # another event, or a line that a kill cut short
                event = parse_json(line)
                if event["job"]["id"] == job:
                    found.append(str(event["command"]))
    return found
