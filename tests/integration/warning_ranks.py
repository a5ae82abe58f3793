"""An entry whose ranks warn, of the same and of different things, and in which rank 1 may then fail.

python warning_ranks.py STRATEGY FORMAT FAILURE     FORMAT: plain or default
                                                    FAILURE: none, UserError, RuntimeError (as in no user's mistake)
"""

from __future__ import annotations

import sys
import warnings

from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError


def entry(world: World) -> None:
    with world.raise_on_all_ranks():
        log.info("started")
        log.warning("the disk is slow")
        warnings.warn("an old call", FutureWarning, stacklevel=1)
        if world.rank == 1:
            log.warning("the disk is %d%% full", 90)
            if sys.argv[3] != "none":
                raise UserError("the disk is full") if sys.argv[3] == "UserError" else RuntimeError("broken")
    log.warning("too late for all ranks")


if __name__ == "__main__":
    run_as_rank(entry, sys.argv[1], log_format=None if sys.argv[2] == "default" else sys.argv[2])
