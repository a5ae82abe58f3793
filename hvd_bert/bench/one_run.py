"""One run of a sweep: its launcher started, waited for and, at a signal or too late, ended with all its ranks."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TO_END_S = 40  # longer than torchrun gives ranks that do not answer, which is longer than others do
_GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGTERM)"


class Stopped(Exception):
    """A signal asked this process, or a run, to stop."""


@contextmanager
def signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGUSR1 raise Stopped inside."""

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(2, b"Stopping: the run that is under way is ended.\n")  # not print, which it may have interrupted
        raise Stopped(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_and_wait(command: Sequence[str], environ: Mapping[str, str], log: TextIO, timeout: float) -> int | None:
    """Run a command to its end, or end it and all it started: after `timeout` s (returns None), or at a signal."""
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is a process to end
    living, held = os.pipe()  # `held` is closed by the last process of the group that ends
    try:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=[held],
            start_new_session=True,  # a Ctrl-C is for this process, which ends the launcher, which ends its ranks
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, unblocked),
        )  # fmt: skip
        os.close(held)
        with _guarded(process.pid):
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    _end(process, living)
    finally:
        os.close(living)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


@contextmanager
def _guarded(group: int) -> Iterator[None]:
    """Should this process end inside, even killed, a process beside it sees the end of its input, and ends `group`."""
    words = [sys.executable, "-I", "-S", "-c", _GUARD, str(group)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as guard:
        try:
            yield
        finally:
            guard.kill()


def _end(process: subprocess.Popen[bytes], living: int) -> None:
    """End a launcher that still runs: in good order first, so that it ends its ranks, also those on other hosts.

    With its group: horovodrun becomes a shell that has mpirun for a child, and does not pass signals on.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        os.killpg(process.pid, signal.SIGTERM)
        ended, _, _ = select.select([living], [], [], TO_END_S)
        if not ended:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# "[1,0]<stderr>:" of horovodrun --mpi, "[0]<stderr>:" of --gloo
_MARK = re.compile(r"^\[\d+(,\d+)?\]<std(out|err)>:")
_EXCEPTION = re.compile(r"^[A-Za-z_.]*(Error|Exception|Interrupt)\b")


def reason_of(path: Path) -> str:
    """Why a run failed, in one line, from its log: the trainer's own word, else an exception, else the last line."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [_MARK.sub("", line).strip() for line in text.splitlines()]
    said = [line.removeprefix("hvd_bert: ") for line in lines if line.startswith("hvd_bert: ")]
    failed = [place for place, line in enumerate(lines) if re.match(r"rank \d+ on \S+ failed:$", line)]
    if not said and failed:
        raised = [line for line in lines[failed[0] :] if _EXCEPTION.match(line)]
        said = [f"{lines[failed[0]].removesuffix(' failed:')}: {raised[0]}"] if raised else []
    return (said or [line for line in lines if _EXCEPTION.match(line)] or [line for line in reversed(lines) if line])[0]
