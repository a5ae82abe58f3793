"""Processes that a test starts end with it, whatever it raises: also those that they started, in whatever session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

LIMIT_S = 60.0
_TOKEN = "HVD_BERT_TEST_LAUNCH"  # in the environment of a process and of all that it starts, so that none can hide
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
    """A process that runs inside the block. It must end within `limit_s` seconds after it, or TimeoutExpired is raised.

    `options`: those of subprocess.Popen.
    """
    token = uuid.uuid4().hex
    process = kind(command, env={**(os.environ if env is None else env), _TOKEN: token}, **options)
    try:
        yield process
        process.wait(limit_s)
    finally:
        _kill(process, token)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what it buffers for a reader that is gone
                    stream.close()


def _kill(process: subprocess.Popen[Any], token: str) -> None:
    """End whatever still lives; launchers give their ranks process groups of their own."""
    process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    mark = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait()
