"""The event file events.jsonl in a run's folder. It records each start, warnings, and why the run ended early.

Rank 0 writes it. Another rank that ends early adds its reason, if it can access the folder.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_bert.storage.reading import open_regular, parse_json
from hvd_bert.storage.writing import JsonLines

NAME = "events.jsonl"


class Events:
    """The event file of the current run. `begin` opens it, and writes the events that were added earlier."""

    def __init__(self) -> None:
        self._early: deque[dict[str, Any]] = deque(maxlen=100)  # events added before `begin`
        self._path: Path | None = None
        self._file: JsonLines | None = None

    def begin(self, folder: Path, writes: bool, facts: dict[str, Any]) -> None:
        """Open the file in a run's folder, and record the start with `facts`. Raises OSError.

        `writes`: whether this rank writes events; other ranks record only why they end early.
        """
        self.end()
        self._path = folder / NAME
        if writes:
            self._file = JsonLines(self._path)
            self._file.write(*self._early)
            self.add("start", command=command(), **facts)
        self._early.clear()  # early events of the other ranks are not recorded

    def add(self, event: str, **values: Any) -> None:
        """Record an event, if this rank writes events. Before `begin`, the event is kept in memory."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        if self._file is not None:
            self._file.write(line)
        elif self._path is None:
            self._early.append(line)

    def failed(self, reason: str) -> None:
        """Record why this rank ends early, if a run has begun."""
        with suppress(OSError):
            if self._file is None and self._path is not None and self._path.exists():  # rank 0 has created it
                self._file = JsonLines(self._path)
            if self._file is not None:
                self.add("end", message=reason)

    def end(self) -> None:
        """Close the file. Events added from now on belong to the next run."""
        if self._file is not None:
            self._file.close()
        self._file = self._path = None


_events = Events()
begin, add, failed, end = _events.begin, _events.add, _events.failed, _events.end


def command() -> str:
    """Return this process's command line, quoted for a shell, with `python` as the interpreter."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def job_commands(folder: Path, job: str) -> list[str]:
    """Return the commands that the Slurm job with ID `job` has run in this folder, oldest first."""
    found = []
    with suppress(OSError), open_regular(folder / NAME) as lines:
        for line in lines:
            with suppress(ValueError, LookupError, TypeError):  # another kind of event, or a truncated line
                event = parse_json(line)
                if event["job"]["id"] == job:
                    found.append(str(event["command"]))
    return found
