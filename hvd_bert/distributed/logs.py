"""Log lines on standard output: their format, and a warning of several ranks as one line."""

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
from hvd_bert.errors import VISIBLE

log = logging.getLogger("hvd_bert")

_MESSAGE = logging.Formatter()  # the message and, if there is one, the traceback


class _Formatter(logging.Formatter):
    """Names the ranks, except where it is rank 0 alone."""

    def __init__(self, rank: int, timed: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s " * timed + "%(prefix)s%(message)s", "%Y-%m-%d %H:%M:%S")
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        ranks = getattr(record, "ranks", [self._rank])
        record.prefix = "" if ranks == [0] else f"{describe_ranks(ranks)}: "
        return super().format(record).rstrip("\n").translate(VISIBLE)  # Python's warnings end in a line break


class _Console(logging.Handler):
    """Standard output. `kept`: a list that collects warnings instead (`collected`)."""

    rank = 0
    kept: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.kept is not None and record.levelno >= logging.WARNING:
            properties = {name: getattr(record, name) for name in ("name", "levelno", "levelname", "created")}
            self.kept.append(logging.makeLogRecord({**properties, "msg": _MESSAGE.format(record)}))
            return
        if record.levelno >= logging.WARNING:
            events.add("warning", ranks=getattr(record, "ranks", [self.rank]), message=_MESSAGE.format(record))
        try:
            with tqdm.external_write_mode(file=sys.stdout):  # does not break a progress bar
                _write(self.format(record), sys.stdout)
        except Exception:
            self.handleError(record)

    def print_kept(self) -> None:
        self.acquire()  # another thread may be logging
        kept, self.kept = self.kept, None
        self.release()
        for record in kept or ():
            self.handle(record)


_console: _Console | None = None


def _write(text: str, stream: TextIO) -> None:
    stream.write(text + "\n")  # one write, unlike print's: launchers tag each, and those of other ranks come between
    stream.flush()


def report(text: str) -> None:
    """Print the reason why a rank ends, on standard error. It has no time: scripts search for how it begins."""
    _write(text, sys.stderr)
    events.failed(text)


def start(rank: int) -> None:
    """Print what is logged, also Python's warnings. Ranks other than 0 print warnings and errors only.

    Lines have a time and a level, except on a terminal without a launcher: Open MPI gives its ranks a terminal,
    wherever its own output goes.
    """
    global _console
    timed = find_launcher(os.environ).size is not None or not sys.stdout.isatty()
    _console = _Console()
    _console.rank = rank
    _console.setFormatter(_Formatter(rank, timed))
    logging.basicConfig(handlers=[_console], force=True)  # replaces an earlier world's, under Horovod elastic
    logging.captureWarnings(True)
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)


@contextmanager
def collected() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings given inside, for `show` on rank 0. Those still in the list at the end are printed here, so
    that none is lost if the block raises.
    """
    kept: list[logging.LogRecord] = []
    console = _console
    if console is None:
        yield kept
        return
    console.kept = kept
    try:
        yield kept
    finally:
        console.print_kept()


def flush() -> None:
    """Print the warnings that are being collected, before the process ends."""
    if _console is not None:
        _console.print_kept()


def show(by_rank: Sequence[Sequence[logging.LogRecord]]) -> None:
    """Log the warnings that each rank collected: equal ones once, with the list of their ranks."""
    merged: dict[tuple[int, str], tuple[logging.LogRecord, list[int]]] = {}
    for rank, records in enumerate(by_rank):
        for record in records:
            _, ranks = merged.setdefault((record.levelno, record.getMessage()), (record, []))
            if rank not in ranks:
                ranks.append(rank)
    for record, ranks in sorted(merged.values(), key=lambda entry: entry[0].created):
        logging.getLogger(record.name).handle(logging.makeLogRecord({**vars(record), "ranks": ranks}))


def warn(by_rank: Sequence[str]) -> None:
    """Log a warning of each rank ("": none) as `show` does."""
    properties = {"name": log.name, "levelno": logging.WARNING, "levelname": "WARNING"}
    show([[logging.makeLogRecord({**properties, "msg": text})] if text else [] for text in by_rank])


def describe_ranks(ranks: Sequence[int]) -> str:
    """[1] -> "rank 1"; [0, 1, 4, 5, 6] -> "ranks 0, 1, 4-6"."""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in increasing order: [0, 1, 4, 5, 6] -> "0, 1, 4-6"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
