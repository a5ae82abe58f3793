"""How fast it is here: the command's first word chooses what is measured.

    python -m hvd_bert.bench                                                      BERT-base, windows like SQuAD's
    horovodrun -np 4 -H a100-01:2,a100-02:2 python -m hvd_bert.bench --bf16
    srun --mpi=pmix python -m hvd_bert.bench --model FOLDER --json bench.json
    python -m hvd_bert.bench sweep --strategies none,horovod,ddp --ranks 1,2,4    one training after the other

Without a word: the ranks that the launcher starts, in one training (speed.py). `sweep`: no rank itself, it starts them.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from hvd_bert.bench import flags
from hvd_bert.config import command_line
from hvd_bert.config.parser import HELP
from hvd_bert.distributed.launch import find_launcher
from hvd_bert.startup import collector_paused

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World


def main(world: World) -> None:
    """The whole measurement on one rank. Called by all ranks."""
    with world.raise_on_all_ranks():
        own, config = flags.parse(sys.argv[1:], show_help=False)
        with collector_paused():
            from hvd_bert.bench import speed
    speed.run(own, config, world)


if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        from hvd_bert.bench import sweep

        sys.exit(sweep.main(sys.argv[2:]))
    if HELP & set(sys.argv):
        flags.parse(sys.argv[1:], show_help=find_launcher(os.environ).speaks_first)
    with collector_paused():
        from hvd_bert.distributed.runner import run_as_rank
    run_as_rank(main, **command_line.before_joining(sys.argv[1:], lambda argv: flags.parse(argv, show_help=False)[1]))
