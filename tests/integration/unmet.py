"""Ranks that cannot meet: the host that keeps their store calls itself by a name that RANK does not know.

python unmet.py RANK STRATEGY
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hvd_bert.launch import find_launcher
from hvd_bert.running import run_as_rank
from hvd_bert.world import World
from hvd_bert.worlds import rendezvous


def connect(host: str, *args: Any, **options: Any) -> Any:
    lost = find_launcher(os.environ).rank == int(sys.argv[1])
    return connects("unknown.invalid" if lost else host, *args, **options)


def entry(world: World) -> None:
    print(f"rank {world.rank} is in", flush=True)


if __name__ == "__main__":
    rendezvous.TIMEOUT_S = 5
    connects, rendezvous.TCPStore = rendezvous.TCPStore, connect
    run_as_rank(entry, sys.argv[2])
