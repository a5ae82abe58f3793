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

# SIGHUP is not handled: it ends this process, and then the guard ends the run.
HANDLED = tuple(number for number in SIGNALS if number != signal.SIGHUP)
TO_END_S = 40  # seconds from SIGTERM to SIGKILL; torchrun kills its ranks sooner, horovodrun over MPI never
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
    """A signal has stopped this process or a run. `then`: how to resume."""

    then = "Rerun the same command to resume."


Watch = Callable[[], None]


@contextmanager
def signals() -> Iterator[Watch]:
    """Make SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 raise Stopped inside the block.

    Yields a function that raises Stopped if a signal has arrived. Call it repeatedly, since Python drops the handler's
    exception if the signal arrives in a finalizer or a fork.
    """
    received: list[str] = []

    def check() -> None:
        if received:
            raise Stopped(received[-1])

    def stop(number: int, frame: FrameType | None) -> None:
        if received:
            return  # the run is being terminated
        with suppress(OSError):  # not `print`, which the signal may have interrupted
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
    """Run a command that starts trainings. Returns its exit status, 75 after a signal, or 2 for bad input."""
    try:
        with signals() as check:
            return run_command(lambda: command(check))
    except Stopped as stopped:
        print(f"Stopped by {stopped}. {stopped.then}".rstrip(), flush=True)
        return EXIT_STOPPED


def train(
    command: Sequence[str], environ: Mapping[str, str], folder: Path, timeout: float, watch: Watch, refuse: bool = False
) -> tuple[str, float]:
    """Run a training that overwrites `folder`; all output goes to run.log.

    `watch`: see `start_and_wait`. `refuse`: raise UserError for bad input instead of returning the reason.
    Returns the reason for a failure ("" without one), and the run's wall time in seconds. A failed training leaves no
    results. Raises Stopped, and UserError if the folder cannot be written.
    """
    with ExitStack() as stack:
        with writing_to("--out", folder):
            make_folder(folder)
            with locked(folder, wait=True):
                # Remove an earlier run's files: the trainer does so later, or never if it fails at the start.
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
        delete(folder / RESULTS)  # with results, a resumed sweep would count the point as done
    if refuse and status == EXIT_BAD_INPUT:
        raise UserError(reason)
    how = f"took longer than --timeout {timeout:g} s" if status is None else f"status {status}"
    return f"{reason} ({how}; {folder / LOG})", seconds


def start_and_wait(
    command: Sequence[str], environ: Mapping[str, str], log: TextIO, timeout: float, watch: Watch
) -> int | None:
    """Run a command. Terminates all its processes after `timeout` seconds or at a signal. Returns its exit status.

    Processes that outlive the command are terminated, too: they would slow down the next run.
    `watch`: function that is called every second. If it raises, the command is terminated.
    Returns None after a timeout, and EXIT_NOT_STARTED if the command cannot be started, with the reason in the log.
    """
    with _guard() as guard_fd, _adopting() as adopted:
        process = None  # a signal may arrive before Popen returns
        try:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only this process, which terminates the ranks
                preexec_fn=lambda: os.write(guard_fd, b"%d\n" % os.getpid()),  # before the command can start ranks
            )
            end = time.monotonic() + timeout
            while (left := end - time.monotonic()) > 0:
                watch()
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, 1))
            return None
        except OSError as error:
            if process:
                raise  # raised by `watch`
            reason = error.strerror or error
            print(f"hvd_bert: {command[0]} cannot be started: {reason}", file=log, flush=True)
            return EXIT_NOT_STARTED
        finally:
            if adopted():
                _end(process, adopted)


@contextmanager
def _guard() -> Iterator[int]:
    """Start a guard: a process that sends SIGTERM to a process group if this process dies, even by SIGKILL.

    Yields the file descriptor to which the caller writes the group's id. The guard's input ends when this process dies.
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
    """Context manager: make this process a subreaper, so that orphaned descendants become its children.

    Yields a function that lists all descendants that were started inside the block.
    """
    libc, this = ctypes.CDLL(None, use_errno=True), psutil.Process()
    before = this.children(recursive=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield lambda: [process for process in this.children(recursive=True) if process not in before]
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end(launcher: subprocess.Popen[bytes] | None, started: Callable[[], list[psutil.Process]]) -> None:
    """Terminate a launcher, which ends its ranks on all hosts; if it has ended, terminate the remaining processes.

    Sends SIGTERM and, after TO_END_S seconds, SIGKILL. SIGTERM goes to the launcher's process group, because horovodrun
    may be a shell that does not forward it to mpirun. `started`: function that lists the processes still running.
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
        with suppress(psutil.NoSuchProcess):  # ended in the meantime
            process.send_signal(number)


def failure_in(path: Path) -> str:
    """Describe a run's failure in one line: the first failure in the log, else the log's last line."""
    lines = list(read_lines(path))
    return visible(first_failure(lines) or next(text for _, text in map(split_mark, reversed(lines)) if text))
