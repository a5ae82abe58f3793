"""Run one training: start its launcher, wait for it, and terminate all ranks at a signal or a timeout."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import psutil

from hvd_bert.distributed.signals import SIGNALS
from hvd_bert.distributed.slurm import IN_SWEEP
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_STOPPED, UserError, visible
from hvd_bert.startup import run_command
from hvd_bert.storage.writing import delete, make_folder, writing_to
from hvd_bert.tools.runs import record
from hvd_bert.tools.runs.failure import first_failure, read_lines, split_mark
from hvd_bert.tools.runs.out_folder import locked
from hvd_bert.tools.runs.record import EVENTS, METRICS, RESULTS

# A closed terminal ends this process, and the guard its run.
HANDLED = tuple(number for number in SIGNALS if number != signal.SIGHUP)
TO_END_S = 40  # longer than torchrun gives ranks that do not respond; horovodrun over MPI waits for them
LOG, MODEL = "run.log", "model.safetensors"
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
EXIT_NOT_STARTED = 127  # a shell's status for a missing program
_GUARD = """
import os, signal, sys
for number in sys.argv[1:]:
    signal.signal(int(number), signal.SIG_IGN)
group = sys.stdin.readline()
sys.stdin.read()
if group:
    os.killpg(int(group), signal.SIGTERM)
"""


class Stopped(Exception):
    """A signal asked this process, or a run, to stop. `then`: how to resume."""

    then = "Rerun the same command to resume."


Watch = Callable[[], None]


@contextmanager
def signals() -> Iterator[Watch]:
    """Make SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 raise Stopped inside the block.

    Yields a function that raises it again: Python drops what a handler raises in a finalizer or inside a fork.
    """
    received: list[str] = []

    def check() -> None:
        if received:
            raise Stopped(received[-1])

    def stop(number: int, frame: FrameType | None) -> None:
        if received:
            return  # the run is being terminated
        with suppress(OSError):  # not print: the signal may have interrupted one
            os.write(2, b"Stopping: terminating the current run.\n")
        received.append(signal.Signals(number).name)
        check()

    with _handler(stop):
        yield check


@contextmanager
def _handler(handle: Any) -> Iterator[None]:
    """Context manager: install `handle` for the signals HANDLED."""
    before = {number: signal.signal(number, handle) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_status(command: Callable[[Watch], int]) -> int:
    """Run a command made of trainings. Returns its status, 75 if a signal stops it, or 2 for bad input."""
    try:
        with signals() as check:
            return run_command(lambda: command(check))
    except Stopped as stopped:
        print(f"Stopped by {stopped}. {stopped.then}".rstrip(), flush=True)
        return EXIT_STOPPED


def train(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, timeout: float, watch: Watch, refuse: bool = False
) -> tuple[str, float]:
    """Run a training with `folder` as its --output_dir, which it overwrites; all output goes to its log.

    `watch`: see `start_and_wait`. `refuse`: raise UserError for bad input, which later runs share.
    Returns why it failed, "" if it did not, and its seconds. A failed training leaves no results there. Raises Stopped,
    and UserError if the folder cannot be written.
    """
    with ExitStack() as stack:
        with writing_to("--out", folder):
            make_folder(folder)
            with locked(folder, wait=True):
                # An earlier run's: the trainer removes them later, and not if it fails at the start.
                for name in (RESULTS, METRICS, EVENTS, LOG, "log.txt"):
                    delete(folder / name)
            log = stack.enter_context((folder / LOG).open("x", encoding="utf-8"))
            print(f"$ {shlex.join(command)}", file=log, flush=True)
        start = time.monotonic()
        status = start_and_wait(command, {**environ, IN_SWEEP: "1"}, log, timeout, watch)
    seconds = round(time.monotonic() - start, 1)
    if status == EXIT_STOPPED:
        raise Stopped(f"a signal to {folder}")
    reason = record.read(folder).comparable() if status == EXIT_OK else failure_in(folder / LOG)
    if not reason:
        return "", seconds
    with writing_to("--out", folder):
        delete(folder / RESULTS)  # else the point would count as done
    if refuse and status == EXIT_BAD_INPUT:
        raise UserError(reason)
    how = f"took longer than --timeout {timeout:g} s" if status is None else f"status {status}"
    return f"{reason} ({how}; {folder / LOG})", seconds


def start_and_wait(
    command: Sequence[str], environ: Mapping[str, str], log: TextIO, timeout: float, watch: Watch
) -> int | None:
    """Run a command; terminate it and its child processes after `timeout` s or at a signal. Returns its status.

    Also terminates what outlives it: the ranks of a launcher that was killed would slow down the next run.
    `watch`: called every second. What it raises terminates the command, too.
    Returns None after a timeout, and EXIT_NOT_STARTED if it cannot be started, with the reason in the log.
    """
    with _guard() as guard_fd, _adopting() as adopted:
        process = None  # after a signal during the start, too
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only this process gets a Ctrl-C; it terminates the ranks
                preexec_fn=lambda: os.write(guard_fd, b"%d\n" % os.getpid()),  # before the command starts
            )
            end = time.monotonic() + timeout
            while (left := end - time.monotonic()) > 0:
                watch()
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, 1))
            return None
        except OSError as error:
            if process:
                raise  # of `watch`
            reason = error.strerror or error
            print(f"hvd_bert: {command[0]} cannot be started: {reason}", file=log, flush=True)
            return EXIT_NOT_STARTED
        finally:
            if adopted():
                _end(process, adopted)


@contextmanager
def _guard() -> Iterator[int]:
    """Start a process that sends SIGTERM to a process group if this process dies inside the block, even by SIGKILL.

    Yields the file descriptor to write the group's id to. The guard sees the end of its input when this process dies.
    """
    command = [sys.executable, "-I", "-S", "-c", _GUARD, *(str(int(number)) for number in HANDLED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        assert guard.stdin
        try:
            yield guard.stdin.fileno()
        finally:
            guard.kill()


@contextmanager
def _adopting() -> Iterator[Callable[[], list[psutil.Process]]]:
    """Context manager: be a subreaper, so that orphaned descendants become our children.

    Yields a function that lists all processes below this one, except those from before the block.
    """
    libc, this = ctypes.CDLL(None, use_errno=True), psutil.Process()
    before = this.children(recursive=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield lambda: [process for process in this.children(recursive=True) if process not in before]
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end(launcher: subprocess.Popen[bytes] | None, started: Callable[[], list[psutil.Process]]) -> None:
    """Terminate a launcher, which ends its ranks, on other hosts too; if it has ended, what it left.

    SIGTERM first, then SIGKILL. A launcher's process group gets the signal: horovodrun may be a shell with mpirun as
    its child that does not forward it. `started`: lists the processes that still run.
    """
    with _handler(signal.SIG_IGN):
        if launcher and launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGTERM)
        else:
            _send(signal.SIGTERM, started())
        deadline = time.monotonic() + TO_END_S
        if launcher:
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(TO_END_S)
        psutil.wait_procs(started(), max(0.0, deadline - time.monotonic()))
        _send(signal.SIGKILL, started())
        if launcher:
            launcher.wait()
        psutil.wait_procs(started(), TO_END_S)


def _send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process.send_signal(number)


def failure_in(path: Path) -> str:
    """Why a run failed, as one line: the first failure in its log, else the last line."""
    lines = list(read_lines(path))
    return visible(first_failure(lines) or next(text for _, text in map(split_mark, reversed(lines)) if text))
