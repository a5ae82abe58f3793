"""A training in which ranks wait for one: `python stalling.py KIND TRAIN'S ARGUMENTS...`.

KIND:
  block  In its fourth step rank 1 reads from a pipe without a writer.
  stop   In its fourth step rank 1's process stops (SIGSTOP).
  slow   Rank 1 loads its model, rank 0 writes its first checkpoint and evaluates, HELD_S longer each.

The file `stalled` gets the time and the process of a block or stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_bert.checkpoint import files
from hvd_bert.config import command_line
from hvd_bert.data.collate import Prefetcher
from hvd_bert.distributed.launch import find_launcher
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.tasks import encoder, question_answering
from hvd_bert.training.api import main

HELD_S = 6.0  # the test's inspector warns within 4 s, the watchdog ends a step after 4
STEP = 4  # by then Horovod has cached the steps' tensors


def stall(kind: str) -> None:
    Path("stalled").write_text(f"{time.time()} {os.getpid()}")
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    os.mkfifo("pipe")
    Path("pipe").read_bytes()


def stalling(kind: str) -> None:
    micro_batches = Prefetcher.micro_batches

    def stalls(self: Prefetcher, number: int) -> Any:
        if number + 1 == STEP:
            stall(kind)
        return micro_batches(self, number)

    Prefetcher.micro_batches = stalls  # type: ignore[method-assign]


def held(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first call takes HELD_S longer."""
    calls: list[int] = []

    def holds(*arguments: Any, **options: Any) -> Any:
        if not calls:
            calls.append(1)
            time.sleep(HELD_S)
            print(f"held in {function.__name__}", flush=True)
        return function(*arguments, **options)

    return holds


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    rank = find_launcher(os.environ).rank
    if kind == "slow" and rank == 1:  # rank 0 would end the job first, since it reports without delay
        encoder.load_model = held(encoder.load_model)
    elif kind == "slow":
        files.write = held(files.write)
        question_answering.score = held(question_answering.score)
    elif rank == 1:
        stalling(kind)
    run_as_rank(main, **command_line.before_joining(sys.argv[1:]))
