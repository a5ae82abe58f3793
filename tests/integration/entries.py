"""Ranks that end, fail, warn or cannot join, for test_entries.py: entries.py ENTRY STRATEGY WORDS...

ending FOLDER [STATUS]: each rank has a running thread and an exit handler. Both append to the rank's file in FOLDER
  when they end. With STATUS, all ranks fail with this status.
failing FOLDER KIND: rank 1 fails while the other ranks wait for it in a collective.
warning FAILURE: ranks print equal and different warnings, then rank 1 fails. FAILURE: none, UserError, RuntimeError.
tokenizing SIGNAL: the rank that tokenizes gets the signal meanwhile.
unmet RANK store|group: RANK cannot reach rank 0's store, or cannot join the process group.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from hvd_bert.config import command_line
from hvd_bert.data import window_table
from hvd_bert.distributed import rendezvous
from hvd_bert.distributed.launch import find_launcher
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import UserError, log
from hvd_bert.tasks.base import load_task


def append(path: Path, words: str) -> None:
    with path.open("a") as file:
        file.write(words + "\n")


def compute() -> None:
    values = torch.ones(300, 300)
    while True:
        values @ values


def ending(world: World, folder: str, status: str = "") -> None:
    path = Path(folder) / f"rank{world.rank}"
    threading.Thread(target=compute, daemon=True).start()
    atexit.register(partial(append, path, "atexit"))

    def write() -> None:  # like an unfinished write of a checkpoint
        threading.main_thread().join()
        append(path, "thread")

    threading.Thread(target=write).start()
    if status:
        raise CollectiveError("all know it", status=int(status))


def failing(world: World, folder: str, kind: str) -> None:
    world.allgather("all are here")
    if world.rank == 1:
        (Path(folder) / "failed_at").write_text(str(time.time()))
        raise UserError("a mistake") if kind == "UserError" else RuntimeError("broken")
    if kind == "allgather":
        world.allgather("waiting for rank 1")
    world.sum(torch.ones(1))


def warning(world: World, failure: str) -> None:
    with world.raise_on_all_ranks():
        log.info("started")
        log.warning("the disk is slow")
        warnings.warn("an old call", FutureWarning, stacklevel=1)
        if world.rank == 1:
            log.warning("the disk is %d%% full", 90)
            if failure != "none":
                raise UserError("the disk is full") if failure == "UserError" else RuntimeError("broken")
    log.warning("too late for all ranks")


def tokenizing(world: World, name: str) -> None:
    def cut(*args: Any) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    window_table.cut = cut
    load_task(command_line.parse(["--config", "sample"]), world)


def unmet(world: World, rank: str, where: str) -> None:
    print(f"rank {world.rank} is in", flush=True)


def lose(rank: int, where: str) -> None:
    connects, begins = rendezvous.TCPStore, distributed.init_process_group
    lost = find_launcher(os.environ).rank == rank

    def connect(host: str, *args: Any, **options: Any) -> Any:
        return connects("unknown.invalid" if lost else host, *args, **options)

    def begin(*args: Any, **options: Any) -> None:
        if lost:
            raise RuntimeError("connectFullMesh failed")
        begins(*args, **options)

    rendezvous.gloo_timeout_s = lambda environ: 2
    if where == "store":
        rendezvous.TCPStore = connect
    else:
        distributed.init_process_group = begin


if __name__ == "__main__":
    _, name, strategy, *words = sys.argv
    if name == "unmet":
        lose(int(words[0]), words[1])
    entries = {"ending": ending, "failing": failing, "warning": warning, "tokenizing": tokenizing, "unmet": unmet}
    run_as_rank(lambda world: entries[name](world, *words), strategy)
