"""An entry in which rank 1 fails while the others wait for it in a collective.

python failing_rank.py FOLDER KIND [STRATEGY]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError


def entry(world: World) -> None:
    world.allgather("all are here")
    if world.rank == 1:
        (Path(sys.argv[1]) / "failed_at").write_text(str(time.time()))
        raise UserError("a mistake on its own") if sys.argv[2] == "UserError" else RuntimeError("broken")
    if sys.argv[2] == "allgather":
        world.allgather("waiting for rank 1")
    world.sum(torch.ones(1))


if __name__ == "__main__":
    run_as_rank(entry, *sys.argv[3:])
