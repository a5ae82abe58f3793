"""Measure the speed of Horovod's allreduce."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.tools.doctor.ranks import LIBRARIES
from hvd_bert.tools.rendering import seconds
from hvd_bert.tools.rendering.page import Grid

REPEATS = 5
SMALL_CALLS = 20  # per repeat: a single call with the small message would only measure how far apart the ranks start


def timing(method: str, num_bytes: int, world_size: int, repeats: Sequence[float]) -> dict[str, Any]:
    """Compute the figures of allreduces of `num_bytes` per rank. `repeats`: seconds per call on the slowest rank.

    `gb_per_s` is the bus bandwidth, in 10^9 bytes per second: in a ring of n ranks, each rank sends 2(n-1)/n times
    `num_bytes`.
    """
    found = {"method": method, "num_bytes": num_bytes, "world_size": world_size, "seconds": repeats}
    median_s = statistics.median(repeats)
    return {**found, "median_s": median_s, "gb_per_s": 2 * (world_size - 1) / world_size * num_bytes / median_s / 1e9}


def measure(world: World, num_bytes: int) -> list[dict[str, Any]]:
    """Time allreduces of `num_bytes` and of 4 bytes. A collective. Returns their figures, see `timing`.

    Raises CollectiveError on all ranks if memory is short or a sum is wrong on any rank.
    """
    import horovod.torch as hvd

    device = world.device if hvd.nccl_built() else torch.device("cpu")
    sizes = (max(1, num_bytes // 4), 1)
    with world.raise_on_all_ranks():
        try:
            buffers = [torch.ones(size, device=device) for size in sizes]
        except (RuntimeError, MemoryError):
            size = f"{num_bytes / 1e6:.1f} MB"
            raise UserError(f"not enough memory for an allreduce of {size}: use a smaller --size.") from None
    over = "NCCL, GPU memory" if device.type == "cuda" else LIBRARIES[world.controller]
    local = [_seconds(world, hvd, buffer) for buffer in buffers]
    slowest = np.array(world.allgather(local)).max(axis=0).tolist()  # [buffers][repeats]
    return [timing(f"Horovod, {over}", 4 * n, world.size, times) for n, times in zip(sizes, slowest, strict=True)]


def _seconds(world: World, hvd: Any, buffer: torch.Tensor) -> list[float]:
    """Measure the seconds per allreduce on this rank, once per repeat. An additional first call checks the sum."""
    times = []
    synchronize: Callable[[], None] = torch.cuda.synchronize if buffer.is_cuda else lambda: None
    for repeat in range(REPEATS + 1):
        calls = SMALL_CALLS if buffer.numel() == 1 and repeat else 1
        buffer.fill_(0.0 if repeat else world.rank + 1.0)  # zeros, as repeated sums of other values would grow
        synchronize()
        world.allgather(None)  # all ranks start together
        start = time.perf_counter()
        for _ in range(calls):
            hvd.allreduce_(buffer, op=hvd.Sum, name=f"hvd_bert.tools.doctor.{buffer.numel()}")
            synchronize()
        times.append((time.perf_counter() - start) / calls)
        with world.raise_on_all_ranks():
            if repeat == 0 and not torch.all(buffer == world.size * (world.size + 1) / 2):
                raise UserError("the sum over the ranks is wrong. Do not train with this installation.")
    return times[1:]


def allreduce_table(timings: Sequence[Mapping[str, Any]]) -> str:
    """Format a table with a row per timing."""
    rows = []
    for timed in timings:
        big = timed["num_bytes"] > 4
        size = f"{timed['num_bytes'] / 1e6:.1f} MB" if big else f"{timed['num_bytes']} bytes"
        spread = f"{seconds(min(timed['seconds']))} to {seconds(max(timed['seconds']))}"
        rate = f"{timed['gb_per_s']:.2f}" if big else ""
        rows.append([size, timed["method"], seconds(timed["median_s"]), spread, rate])
    return Grid(["allreduce of", "by", "median", "min to max", "GB/s"], rows, words=2).for_terminal()
