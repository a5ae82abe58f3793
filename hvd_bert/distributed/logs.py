"""Log to standard output. Equal warnings of several ranks become one line."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from hvd_bert.distributed import events
from hvd_bert.distributed.launch import find_launcher
from hvd_bert.errors import log, visible

_MESSAGE = logging.Formatter()  # formats the message and any traceback


class _Console(logging.Handler):
    """Handler that logs to standard output. `collecting`: the list to which `collected` redirects warnings, or None."""

    collecting: list[str] | None = None

    def __init__(self, rank: int, timed: bool) -> None:
        super().__init__()
        self._rank = rank
        time = "%(asctime)s %(levelname)s " if timed else ""
        self.setFormatter(logging.Formatter(f"{time}%(prefix)s%(message)s", "%Y-%m-%d %H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        """Format a record. The line begins with its ranks, unless it comes from rank 0 alone."""
        ranks = getattr(record, "ranks", [self._rank])
        record.prefix = "" if ranks == [0] else f"{describe_ranks(ranks)}: "
        return visible(super().format(record).rstrip("\n"))  # Python's warnings end with a line break

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            message = _MESSAGE.format(record)
            if self.collecting is not None:
                self.collecting.append(message)
                return
            events.add("warning", ranks=getattr(record, "ranks", [self._rank]), message=message)
        try:
            with tqdm.external_write_mode(file=sys.stdout):  # keeps progress bars intact
                _write(self.format(record), sys.stdout)
        except Exception:
            self.handleError(record)


def _write(text: str, stream: TextIO) -> None:
    stream.write(text + "\n")  # one write, unlike print: launchers prefix each write, and interleave ranks
    stream.flush()


def report(text: str) -> None:
    """Write `text`, the reason why this rank ends or leaves its world, to standard error and to events.jsonl."""
    _write(text, sys.stderr)
    events.failed(text)


def start(rank: int) -> None:
    """Set up logging of this package's records and Python's warnings. Ranks other than 0 log only warnings and errors.

    Lines have a time and a level, except on a terminal without a launcher. A terminal alone is not enough, since Open
    MPI gives its ranks a terminal even if its own output goes to a file.
    """
    timed = find_launcher(os.environ).size is not None or not sys.stdout.isatty()
    logging.basicConfig(handlers=[_Console(rank, timed)], force=True)  # `force`: elastic's next world replaces it
    logging.captureWarnings(True)
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)


def _consoles() -> list[_Console]:
    """Return the handlers that `start` has set."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _Console)]


@contextmanager
def collected() -> Iterator[list[str]]:
    """Context manager: collect the warnings of the block in the yielded list, for `show` on rank 0.

    Warnings that are still in the list at the end are printed on this rank, so that none is lost if the block raises.
    """
    messages: list[str] = []
    for console in _consoles():
        console.collecting = messages
    try:
        yield messages
    finally:
        flush()


def flush() -> None:
    """Print the collected warnings, and stop collecting."""
    for console in _consoles():
        console.acquire()  # another thread may be logging
        messages, console.collecting = console.collecting, None
        console.release()
        for message in messages or ():
            log.warning("%s", message)


def show(by_rank: Sequence[Sequence[str]]) -> None:
    """Log the collected warnings of all ranks. Equal warnings become one line with a list of the ranks."""
    merged: dict[str, list[int]] = {}
    for rank, messages in enumerate(by_rank):
        for message in dict.fromkeys(messages):
            merged.setdefault(message, []).append(rank)
    for message, ranks in merged.items():
        log.warning("%s", message, extra={"ranks": ranks})


def describe_ranks(ranks: Sequence[int]) -> str:
    """Format ranks: [1] -> "rank 1"; [0, 1, 4, 5, 6] -> "ranks 0, 1, 4-6"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """Format increasing numbers as ranges: [0, 1, 4, 5, 6] -> "0, 1, 4-6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
