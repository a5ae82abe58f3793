"""Standard output and error that may get lost: a reader that ended (`| head`), a full disk, a closed stream (`>&-`).

Python would raise an error in whatever prints next, and for characters that the locale cannot encode, which are printed
as \\u20ac. And Ctrl-C in a command: one line and status 130, without a traceback.
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
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from hvd_bert.errors import EXIT_BROKEN_PIPE, EXIT_FAILURE, EXIT_INTERRUPTED

PATIENCE_S = 60.0  # horovodrun --gloo keeps its pipe open but stops reading it once its own output is lost
INTERRUPTED = "hvd_bert: interrupted"


def keep_running() -> None:
    """From now on, drop what cannot be printed, with one warning. For commands that do more than print."""
    _replace(_Dropping)


def end_when_lost() -> None:
    """From now on, end this process when standard output is lost. For commands that only print."""
    _replace(_Ending)


class _Dropping(io.FileIO):
    lost = False

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        size = left.nbytes
        try:
            # A pipe that is ready takes this many bytes at once, unless other processes fill it meanwhile. A longer
            # write can wait for its reader without end.
            at_once = size if stat.S_ISREG(os.fstat(self.fileno()).st_mode) else select.PIPE_BUF
            while left:
                if not select.select([], [self], [], 0 if self.lost else PATIENCE_S)[1]:
                    raise OSError(f"it was not read for {PATIENCE_S:g} s")
                written = super().write(left[:at_once])
                left = left[written or 0 :]  # None: a non-blocking stream is full
        except OSError as error:
            if not self.lost and self.fileno() == 1:
                reason = f"standard output cannot be written ({error.strerror or error})"
                _write_error(f"warning: {reason}: the command continues without it.\n")
            self.lost = True  # later writes are tried: the disk may have space again
        return size


class _Ending(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _end(error)


def _end(error: OSError) -> NoReturn:
    """End at once: an exception would be printed with a traceback, or be ignored at the interpreter's exit."""
    if error.errno == errno.EPIPE:
        os._exit(EXIT_BROKEN_PIPE)
    _write_error(f"hvd_bert: standard output cannot be written: {error.strerror}.\n")
    os._exit(EXIT_FAILURE)


def _write_error(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line.encode())


def _replace(stdout: type[io.FileIO]) -> None:
    """Replace sys.stdout by a stream on `stdout`, and sys.stderr, unless another program has replaced them already."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a file could be opened as number 1, and printed into
        pass
    os.close(spare)
    for number, name, kind in ((1, "stdout", stdout), (2, "stderr", _Dropping)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # to the end of the process
        elif _is_standard(stream, number):
            with contextlib.suppress(OSError):
                stream.flush()
            through = stream.write_through  # of python -u: without a buffer
            raw = kind(number, "w", closefd=False)
            text = io.TextIOWrapper(
                raw if through else io.BufferedWriter(raw), stream.encoding, "backslashreplace",
                line_buffering=stream.line_buffering, write_through=through,
            )  # fmt: skip
            setattr(sys, name, text)


def _is_standard(stream: object, number: int) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):  # a test's, in memory
        return False


def end_when_interrupted() -> None:
    """End this process at SIGINT, from now on. A process that ignores it (nohup, a shell's `&`) still does.

    At once, because an exception could be caught by a library that is being imported.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    command = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == command:  # not in a process that it forked
            with contextlib.suppress(OSError):  # Ctrl-C may have ended what reads it, such as `tee`
                os.write(2, f"{INTERRUPTED}\n".encode())
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, end)


def in_main_thread() -> bool:
    """Whether this thread may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT inside the block, for code that must clean up. Only in the main thread."""
    if not in_main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
