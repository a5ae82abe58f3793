"""The clocks of hosts, which differ by what NTP leaves: how far each rank's is from rank 0's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hvd_bert.distributed.world import World

ROUNDS = 10


def clock_offset_ns(world: World) -> int:
    """By how many ns this host's clock is ahead of rank 0's; 0 on rank 0's own host. A collective.

    From when each rank went into an allgather and came out of it, ROUNDS times: right to half of the fastest one.
    """
    moments = []
    for _ in range(ROUNDS):
        entered = time.time_ns()
        world.allgather(None)
        moments.append((entered, time.time_ns()))
    everyone = world.allgather((world.host, moments))
    (first_host, first), (my_host, mine) = everyone[0], everyone[world.rank]
    return 0 if my_host == first_host else _offset(first, mine)


def _offset(first: Sequence[tuple[int, int]], mine: Sequence[tuple[int, int]]) -> int:
    """Nobody leaves an allgather before the last has entered it, which bounds the offset from both sides."""
    minimum = max(entered - left for (_, left), (entered, _) in zip(first, mine, strict=True))
    maximum = min(left - entered for (entered, _), (_, left) in zip(first, mine, strict=True))
    return (minimum + maximum) // 2
