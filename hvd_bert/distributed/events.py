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

from hvd_bert.storage import written
from hvd_bert.storage.reading import open_regular, parse_json
from hvd_bert.storage.writing import JsonLines

NAME = "events.jsonl"
_MAX_EARLY = 100

_early: list[dict[str, Any]] = []  # from before the folder was known
_path: Path | None = None
_file: JsonLines | None = None


def begin(folder: Path, writes: bool, facts: dict[str, Any]) -> None:
    """A run starts in its folder. `writes`: on rank 0. Raises OSError."""
    global _path
    end()
    _path = folder / NAME
    if writes:
        written.add(folder, NAME)
        _open(_path)
        add("start", command=command(), **facts)


def command() -> str:
    """The command line of this process."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def commands_of_job(folder: Path, job: str) -> list[str]:
    """The commands of the runs that a Slurm job has started in a folder."""
    found = []
    with suppress(OSError), open_regular(folder / NAME) as lines:
        for line in lines:
            with suppress(ValueError, LookupError, TypeError):  # another event, or a line that a kill cut short
                event = parse_json(line)
                if event["job"]["id"] == job:
                    found.append(str(event["command"]))
    return found


def _open(path: Path) -> None:
    global _file
    _file = JsonLines(path)
    _file.write(*_early)
    _early.clear()


def add(event: str, **values: Any) -> None:
    """Record an event, or keep it until `begin`."""
    line = {"event": event, "time": round(time.time(), 3), **values}
    if _file is not None:
        _file.write(line)
    elif len(_early) < _MAX_EARLY:
        _early.append(line)


def failed(reason: str) -> None:
    """Record why this rank ends early, if it is in a run."""
    if _path is not None:
        with suppress(OSError):
            if _file is None and _path.exists():  # rank 0's
                _early.clear()  # this rank's warnings, of which rank 0 has those that it logged for all ranks
                _open(_path)
            if _file is not None:
                add("end", message=reason)


def end() -> None:
    """The run has ended as planned."""
    global _file, _path
    if _file is not None:
        _file.close()
    _file = _path = None
