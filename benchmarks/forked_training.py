"""A training in forked child processes: it starts with everything imported and reports each step that it begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import hvd_bert.training.loop  # noqa: F401  # which the command imports late, and here the child would
from hvd_bert.data.collate import Batch, Prefetcher
from hvd_bert.distributed.rendezvous import serve_store
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.training.api import main as train

NUMBER_BYTES = 8
served: list[Any] = []  # stores of `start_ranks`, in place of those of torchrun's agent, until this process ends


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

    def reporting(step: int) -> None:
        os.write(writing, step.to_bytes(NUMBER_BYTES, "little"))
        if before_step:
            before_step(step)

    call_before_each_step(reporting)
    sys.argv = ["hvd_bert.train", *flags]
    status = 1
    try:
        run_as_rank(train)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)  # the rest of the program is the parent's


def start_ranks(
    flags: Sequence[str], size: int, before_step: Callable[[int], None] | None = None
) -> list[tuple[int, int]]:
    """Train on `size` ranks over Gloo, with torchrun's variables. Returns what `start` returns, for each rank."""
    served.append(serve_store("127.0.0.1"))
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": served[-1].port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    job |= {"TORCHELASTIC_RUN_ID": "forked", "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
    started = []
    for rank in range(size):
        environ = {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        with patch.dict(os.environ, environ):
            started.append(start(flags, before_step))
    return started


def call_before_each_step(before_step: Callable[[int], None]) -> None:
    """From now on this process calls `before_step` with the number of each step (1, 2, ...) that it begins."""
    of_step = Prefetcher.of_step

    def calling(self: Prefetcher, step: int) -> Iterator[Batch]:
        before_step(step + 1)
        return of_step(self, step)

    Prefetcher.of_step = calling  # type: ignore[method-assign]


def read_step(pipe: int) -> int | None:
    """The next step that the child began, as soon as it begins it; None after its end."""
    message = os.read(pipe, NUMBER_BYTES)
    return int.from_bytes(message, "little") if message else None
