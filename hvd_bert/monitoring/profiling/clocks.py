"""Measure the offset of each host's clock from rank 0's, because NTP does not align clocks exactly."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hvd_bert.distributed.world import World

ROUNDS = 10


def clock_offset_ns(world: World) -> int:
    """Nanoseconds by which this host's clock is ahead of rank 0's; 0 on rank 0's own host. A collective.

    Uses the times at which each rank enters and leaves ROUNDS allgathers. The error is at most half the fastest one.
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
    """No rank leaves an allgather before the last has entered it. This bounds the offset from both sides."""
    minimum = max(entered - left for (_, left), (entered, _) in zip(first, mine, strict=True))
    maximum = min(left - entered for (entered, _), (_, left) in zip(first, mine, strict=True))
    return (minimum + maximum) // 2
