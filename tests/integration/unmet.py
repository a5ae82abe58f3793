"""Ranks of which RANK cannot reach the others, at rank 0's store or in the group made through it.

python unmet.py RANK STRATEGY store|group
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import distributed

from hvd_bert.distributed import rendezvous
from hvd_bert.distributed.launch import find_launcher
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World


def lost() -> bool:
    return find_launcher(os.environ).rank == int(sys.argv[1])


def connect(host: str, *args: Any, **options: Any) -> Any:
    """The store's host uses a name that RANK cannot resolve."""
    return connects("unknown.invalid" if lost() else host, *args, **options)


def begin(*args: Any, **options: Any) -> None:
    if lost():
        raise RuntimeError("connectFullMesh failed")
    begins(*args, **options)


def entry(world: World) -> None:
    print(f"rank {world.rank} is in", flush=True)


if __name__ == "__main__":
    rendezvous.gloo_timeout_s = lambda environ: 5
    if sys.argv[3] == "store":
        connects, rendezvous.TCPStore = rendezvous.TCPStore, connect
    else:
        begins, distributed.init_process_group = distributed.init_process_group, begin
    run_as_rank(entry, sys.argv[2])
