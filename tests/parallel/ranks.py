"""Run all checks of this folder on the ranks of one launch, because starting ranks takes seconds.

    horovodrun -np 4 --gloo -H localhost:4 python ranks.py FOLDER CONTROLLER STRATEGY

All ranks call each check, which asserts on every rank. Rank 0 writes FOLDER/results.json after each check: check ->
traceback, or null, of every rank. `test_worlds.py` starts this program and reads the file.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World


@dataclass(frozen=True)
class Ranks:
    """The argument of a check: the world, the expected controller, a folder for files, and the strategy."""

    world: World
    controller: str
    folder: Path
    strategy: str

    @property
    def runs_expensive_checks(self) -> bool:
        return runs_expensive_checks(self.world.size, self.strategy)


Check = Callable[[Ranks], None]
CHECKS: dict[str, Check] = {}
HOROVOD_CHECKS: set[str] = set()  # checks of Horovod's traps, and checks that the strategy does not affect
EXPENSIVE_CHECKS: set[str] = set()


def runs_expensive_checks(size: int, strategy: str) -> bool:
    """Return whether a world is its strategy's smallest world of several ranks, or one process without a strategy."""
    return (size, strategy) in ((2, "horovod"), (2, "ddp"), (4, "fsdp"), (2, "deepspeed"), (1, "none"))


def check(function: Check) -> Check:
    """Register a check under its function's name, for Horovod's worlds only."""
    HOROVOD_CHECKS.add(function.__name__)
    return check_every_strategy(function)


def check_every_strategy(function: Check) -> Check:
    """Register a check under its function's name, for every world."""
    assert function.__name__ not in CHECKS
    CHECKS[function.__name__] = function
    return function


def expensive(function: Check) -> Check:
    """Run a registered check in only one world per strategy, because the number of ranks does not matter."""
    EXPENSIVE_CHECKS.add(function.__name__)
    return function


def check_names(size: int, strategy: str) -> list[str]:
    """Return the names of a world's checks in the order in which they run."""
    left_out = set() if strategy == "horovod" else HOROVOD_CHECKS
    if not runs_expensive_checks(size, strategy):
        left_out = left_out | EXPENSIVE_CHECKS
    return [name for name in CHECKS if name not in left_out]


def call(main: Callable[[World], object], world: World, words: Sequence[object]) -> None:
    """Call a command's main function with `words` as its command line."""
    before, sys.argv = sys.argv, ["command", *map(str, words)]
    try:
        main(world)
    finally:
        sys.argv = before


def run_checks(world: World) -> None:
    """Run all checks in order, even after a failed check."""
    for kind in ["world", "training", "command", "strategy", "evaluation", "predict", "resume", "task", "health"]:
        importlib.import_module(f"{kind}_checks")  # registers checks
    folder, controller, strategy = Path(sys.argv[1]), *sys.argv[2:]
    results: dict[str, list[str | None]] = {}
    for name in check_names(world.size, strategy):
        failure, start = None, time.monotonic()
        try:
            CHECKS[name](Ranks(world, controller, folder, strategy))
        except Exception:
            failure = traceback.format_exc()
            # Print at once, because the other ranks may wait for this rank until all are killed.
            print(f"rank {world.rank}: {name}: {failure}", file=sys.stderr, flush=True)
        results[name] = world.allgather(failure)
        if world.rank == 0:
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
            (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    sys.modules["ranks"] = sys.modules["__main__"]  # the checks import this module by its name
    if sys.argv[3] == "ddp" and "TORCHELASTIC_RUN_ID" in os.environ:  # test that ddp needs no Horovod
        sys.modules.update({name: None for name in ("horovod", "horovod.torch")})  # type: ignore[misc]
    run_as_rank(run_checks, sys.argv[3].partition(":")[0])
