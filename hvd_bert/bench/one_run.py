"""One run of a sweep: its launcher started, waited for and, at a signal or too late, ended with all its ranks."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TO_END_S = 40  # longer than torchrun gives ranks that do not answer, which is longer than others do
_PR_SET_PDEATHSIG = 1  # of prctl(2)


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

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        # Have the kernel send SIGTERM to this new process when its parent ends, even if that is killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    try:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for this process, which ends the launcher, which ends its ranks
            preexec_fn=begin,
        )  # fmt: skip
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs: in good order first, so that it ends its ranks, also those on other hosts."""
    if process.poll() is not None:
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        process.terminate()
        process.wait(TO_END_S)
    except subprocess.TimeoutExpired:
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
