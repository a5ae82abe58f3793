"""Evaluate a trained model: scores, where it fails, and whether it is better than another model.

    hvd-bert evaluate MODEL --validation_file dev-v1.1.json                          one process
    horovodrun -np 4 -H localhost:4 hvd-bert evaluate MODEL --output_dir runs/scores    four ranks
    hvd-bert evaluate MODEL --compare OTHER                                          two models

Exit status: 0 evaluated, 1 failure, 2 bad input. `running.py` has the rest, so that --help does not wait for imports.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hvd_bert.startup import collector_paused, start_rank
from hvd_bert.tools.evaluate import flags

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World


def main(world: World) -> None:
    """The whole command on one rank. Called by all ranks."""
    with world.raise_on_all_ranks():
        own, configs = flags.parse(sys.argv[1:])
        with collector_paused():
            from hvd_bert.tools.evaluate import running
    running.run(own, configs, world)


if __name__ == "__main__":
    start_rank(main, lambda argv: flags.parse(argv)[1][0])
