"""Measure the trainer's throughput, or run a sweep.

    hvd-bert bench                                                      BERT-base, windows as long as SQuAD's
    horovodrun -np 4 -H a100-01:2,a100-02:2 hvd-bert bench --bf16
    srun --mpi=pmix hvd-bert bench --model FOLDER --json bench.json
    hvd-bert bench sweep --strategies none,horovod,ddp --ranks 1,2,4    a training per strategy and world size

Without `sweep` it trains on the ranks that the launcher starts (speed.py). `sweep` starts the ranks itself (sweep.py).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hvd_bert.startup import collector_paused, start_rank
from hvd_bert.streams import end_when_lost
from hvd_bert.tools.bench import flags

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World


def main(world: World) -> None:
    """Run the whole measurement on one rank. Called by all ranks."""
    with world.raise_on_all_ranks():
        own, config = flags.parse(sys.argv[1:])
    with collector_paused():
        from hvd_bert.tools.bench import speed
    speed.run(own, config, world)


if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        from hvd_bert.tools.bench import sweep

        end_when_lost()
        sys.exit(sweep.main(sys.argv[2:]))
    start_rank(main, lambda argv: flags.parse(argv)[1])
