"""Start processes whose descendants are also killed at the end; kill this process before an exact file operation."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

LIMIT_S = 60.0
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"}  # Python's audit events
TOKEN = "HVD_BERT_TEST_LAUNCH"  # environment variable that marks a process and all its descendants
Process = TypeVar("Process", bound="subprocess.Popen[Any]")


@contextmanager
def started(
    command: Sequence[str | Path],
    kind: type[Process] = subprocess.Popen,  # type: ignore[assignment]
    *,
    limit_s: float = LIMIT_S,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Process]:
    """Context manager: start a process. On exit, wait for its end, then kill its remaining descendants.

    If the block raises or the process does not end within `limit_s` seconds, also kills the process. The time limit
    raises TimeoutExpired. `options`: arguments of subprocess.Popen.
    """
    token = uuid.uuid4().hex
    process = kind(command, env={**(os.environ if env is None else env), TOKEN: token}, **options)
    try:
        yield process
        process.wait(limit_s)
    finally:
        _kill(process, token)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # closing fails if text is buffered for a process that has ended
                    stream.close()


def _kill(process: subprocess.Popen[Any], token: str) -> None:
    """Kill the process and its descendants, even in other process groups, such as a launcher's ranks."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    mark = f"{TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait()


@contextmanager
def killed_before_change(number: int) -> Iterator[None]:
    """Context manager: kill this process before it opens, makes, renames or removes a file for the `number`th time."""
    changes, watches = itertools.count(1), True

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        if watches and event in CHANGES and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)  # stays for the rest of the process
    yield
    watches = False
