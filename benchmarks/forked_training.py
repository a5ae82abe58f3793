"""A training in a forked child process: it starts with everything imported and reports each step that it begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence

import hvd_bert.train.loop  # noqa: F401  # which the command imports late, and here the child would
from hvd_bert.data.collate import Batch
from hvd_bert.data.prefetch import Prefetcher
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.train.__main__ import main as train

NUMBER_BYTES = 8


def start(flags: Sequence[str], before_step: Callable[[int], None] | None = None) -> tuple[int, int]:
    """Train with these flags in a child. Returns its process id and the reading end of its pipe.

    Into the pipe goes the number of each step (1, 2, ...) as the child begins it; then it calls `before_step`.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    of_step = Prefetcher.of_step

    def reporting(self: Prefetcher, step: int) -> Iterator[Batch]:
        os.write(writing, (step + 1).to_bytes(NUMBER_BYTES, "little"))
        if before_step:
            before_step(step + 1)
        return of_step(self, step)

    Prefetcher.of_step = reporting  # type: ignore[method-assign]
    sys.argv = ["hvd_bert.train", *flags]
    status = 1
    try:
        run_as_rank(train)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)  # the rest of the program is the parent's


def read_step(pipe: int) -> int | None:
    """The next step that the child began, as soon as it begins it; None after its end."""
    message = os.read(pipe, NUMBER_BYTES)
    return int.from_bytes(message, "little") if message else None
