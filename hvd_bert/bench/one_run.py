"""One training: its launcher started, waited for and, at a signal or too late, ended with all its ranks; its speed."""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from hvd_bert.bench.record import locked, writing
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, EXIT_STOPPED, UserError
from hvd_bert.runs import reading
from hvd_bert.runs.run import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TO_END_S = 40  # longer than torchrun gives ranks that do not answer, which is longer than others do
LOG = "log.txt"
EXIT_NOT_STARTED = 127  # as a shell has it for a program that is not there
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
group = sys.stdin.readline()
sys.stdin.read()
if group:
    os.killpg(int(group), signal.SIGTERM)
"""


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


def exit_status(command: Callable[[], int]) -> int:
    """Run a command made of trainings: 75 where a signal stops it (the same command goes on), 2 for bad input."""
    try:
        with signals():
            return command()
    except Stopped as stopped:
        print(f"Stopped by {stopped}: the same command goes on.", flush=True)
        return EXIT_STOPPED
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


@dataclass(frozen=True)
class Trained:
    """What became of a training. `run`: what it left; None: it failed, and `reason` says why. `status`: its launcher's;
    None: it took too long. `seconds`: from its start to its end."""

    run: Run | None
    reason: str
    status: int | None
    seconds: float


def train(command: Sequence[str], environ: Mapping[str, str], folder: Path, timeout: float) -> Trained:
    """Run a training whose --output_dir is `folder`, which is made anew, with all that is said in its log.

    Raises Stopped, and UserError where the folder cannot be written. One that failed leaves no results there.
    """
    with ExitStack() as until_it_ended:
        with writing(folder):
            if folder.exists():
                with locked(folder, wait=True):
                    shutil.rmtree(folder)
            folder.mkdir(parents=True)
            log = until_it_ended.enter_context((folder / LOG).open("w", encoding="utf-8"))
            print(f"$ {shlex.join(command)}", file=log, flush=True)
        start = time.monotonic()
        status = start_and_wait(command, environ, log, timeout)
    seconds = round(time.monotonic() - start, 1)
    if status == EXIT_STOPPED:
        raise Stopped(f"a signal to {folder}")
    reason = "" if status == EXIT_OK else reason_of(folder / LOG)
    if not reason:
        try:
            return Trained(reading.read(folder), "", status, seconds)
        except reading.Unusable as error:
            reason = str(error)
    with writing(folder):
        (folder / reading.RESULTS).unlink(missing_ok=True)  # or it would count as done
    return Trained(None, reason, status, seconds)


def start_and_wait(command: Sequence[str], environ: Mapping[str, str], log: TextIO, timeout: float) -> int | None:
    """Run a command to its end, or end it and all it started: after `timeout` s (returns None), or at a signal.

    Returns EXIT_NOT_STARTED where it cannot be started; the log says why.
    """
    living, held = os.pipe()  # `held` is closed by the last process of the group that ends
    try:
        with ExitStack() as until_it_can_be_ended, _guard() as told:
            until_it_can_be_ended.enter_context(_deferred())
            try:
                process = subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    pass_fds=[held],
                    start_new_session=True,  # a Ctrl-C is for this process, which ends launcher and ranks
                    preexec_fn=lambda: os.write(told, b"%d\n" % os.getpid()),  # the guard knows of it before it begins
                )  # fmt: skip
            except OSError as error:
                why = error.strerror or error
                print(f"hvd_bert: {command[0]} cannot be started: {why}", file=log, flush=True)
                return EXIT_NOT_STARTED
            finally:
                os.close(held)
            try:
                until_it_can_be_ended.close()
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    _end(process, living)
    finally:
        os.close(living)


@contextmanager
def _deferred() -> Iterator[None]:
    """Signals that come inside are handled after it.

    By handlers and not by a mask: what one thread blocks another may receive, and Python then calls the handler in the
    main thread all the same.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _guard() -> Iterator[int]:
    """Yields the file descriptor to write a process group's id to: should this process end inside, even killed, a
    process beside it sees the end of its input, and sends that group SIGTERM.
    """
    words = [sys.executable, "-I", "-S", "-c", _GUARD]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as guard:
        assert guard.stdin
        try:
            yield guard.stdin.fileno()
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
