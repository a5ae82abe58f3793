"""Handle lost standard streams, Ctrl-C and other signals in commands.

A stream is lost if its reader ends (`| head`), its disk is full or it is closed (`>&-`). Python would then raise an
error at the next print. It would also raise one for a character that the locale cannot encode; here an escape such as
\\u20ac is printed instead. Ctrl-C prints one line and exits with status 130, without a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

from hvd_bert.errors import EXIT_BROKEN_PIPE, EXIT_FAILURE, EXIT_INTERRUPTED

# Limit for a write. If horovodrun --gloo loses its own output, it stops reading the pipe without closing it.
PATIENCE_S = 60.0
# Signals that end a process without cleaning up, unlike SIGINT.
UNCLEAN = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
INTERRUPTED = "hvd_bert: interrupted"


def keep_running() -> None:
    """Drop all later output to a lost stream, and warn once if it is stdout. For commands that do more than print."""
    _replace_streams(ends=False)


def end_when_lost() -> None:
    """Make the next write to a lost standard output end this process. For commands that only print."""
    _replace_streams(ends=True)


class _Stream(io.FileIO):
    """A standard stream. `ends`: whether its loss ends the process. If not, output that it cannot write is dropped."""

    ends = lost = False

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        size = left.nbytes
        try:
            # A ready pipe accepts PIPE_BUF bytes without waiting for its reader.
            at_once = size if stat.S_ISREG(os.fstat(self.fileno()).st_mode) else select.PIPE_BUF
            patience_s = None if self.ends else 0 if self.lost else PATIENCE_S
            while left:
                if not select.select([], [self], [], patience_s)[1]:
                    raise OSError(f"it was not read for {PATIENCE_S:g} s")
                written = super().write(left[:at_once])
                left = left[written or 0 :]  # `written` is None if a non-blocking stream is full
        except OSError as error:
            if self.ends:  # an exception would be printed with a traceback, or be ignored at Python's exit
                if error.errno != errno.EPIPE:
                    _write_error(f"hvd_bert: standard output cannot be written: {error.strerror}.\n")
                os._exit(EXIT_BROKEN_PIPE if error.errno == errno.EPIPE else EXIT_FAILURE)
            if not self.lost and self.fileno() == 1:
                reason = f"standard output cannot be written ({error.strerror or error})"
                _write_error(f"warning: {reason}: the command continues without it.\n")
            self.lost = True  # later writes still try, since the disk may have space again
        return size


def _write_error(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


def _replace_streams(ends: bool) -> None:
    """Replace sys.stdout and sys.stderr, unless the program has. `ends`: whether losing stdout ends the process."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next opened file would become stdout or stderr
        pass
    os.close(spare)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open until the process ends
        elif _is_standard(stream, number):
            with contextlib.suppress(OSError):
                stream.flush()
            through = stream.write_through  # set by `python -u`
            raw = _Stream(number, "w", closefd=False)
            raw.ends = ends and number == 1
            text = io.TextIOWrapper(
                raw if through else io.BufferedWriter(raw),
                stream.encoding,
                "backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=through,
            )
            setattr(sys, name, text)


def _is_standard(stream: object, number: int) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):  # an in-memory stream
        return False


def end_when_interrupted() -> None:
    """Make SIGINT end this command's process, unless the process ignores SIGINT (nohup, a shell's `&`).

    The handler does not raise KeyboardInterrupt, which a library that is being imported could catch.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_end_interrupted, os.getpid()))


def _end_interrupted(command: int, number: int, frame: FrameType | None) -> None:
    if os.getpid() == command:  # not in a forked child
        _write_error(f"{INTERRUPTED}\n")  # not print, which would raise if the reader, such as `tee`, has ended
    os._exit(EXIT_INTERRUPTED)


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that may set signal handlers."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context manager: in a command, SIGINT raises KeyboardInterrupt, so that the block can clean up.

    In a program that imports this package, SIGINT is handled as before.
    """
    before = signal.getsignal(signal.SIGINT)
    if getattr(before, "func", None) is not _end_interrupted:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def before_ending(clean_up: Callable[[], object]) -> Iterator[None]:
    """Context manager: call `clean_up` if a signal of UNCLEAN ends this process in the block."""
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not in a forked child
            with contextlib.suppress(OSError):
                clean_up()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # A program's own handlers stay.
    handled = [number for number in UNCLEAN if in_main_thread() and signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
