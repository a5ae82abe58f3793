"""Ctrl-C in a command: one line and status 130, without a traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hvd_bert.errors import EXIT_INTERRUPTED

MESSAGE = "hvd_bert: interrupted"


def end_quietly() -> None:
    """End this process at SIGINT, from now on. A process that ignores it (nohup, a shell's `&`) still does.

    At once, because an exception could be caught by a library that is being imported.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    command = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == command:  # not in a process that it forked
            with suppress(OSError):  # Ctrl-C may have ended what reads it, such as `tee`
                os.write(2, f"{MESSAGE}\n".encode())
        os._exit(EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, end)


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT inside the block, for code that must clean up."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
