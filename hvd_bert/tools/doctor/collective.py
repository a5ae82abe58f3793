"""Measure Horovod's allreduce of gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.tools.rendering import seconds
from hvd_bert.tools.rendering.page import Grid

REPEATS = 5
SMALL_CALLS = 20  # per repeat of the small message, which takes less time than ranks differ at the start


@dataclass(frozen=True)
class Timing:
    """Seconds per allreduce of `num_bytes` per rank, for each repeat on the slowest rank."""

    method: str
    num_bytes: int
    world_size: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second that a rank sends: a ring sends each byte 2(n-1)/n times ("bus bandwidth")."""
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes / self.median_s / 1e9

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "median_s": self.median_s, "gb_per_s": self.gb_per_s}


def measure(world: World, num_bytes: int) -> list[Timing]:
    """Time allreduces of `num_bytes` and of 4 bytes. A collective. Raises UserError on all ranks if memory is short."""
    import horovod.torch as hvd

    device = world.device if hvd.nccl_built() else torch.device("cpu")
    count = max(1, num_bytes // 4)
    with world.raise_on_all_ranks():
        try:
            buffers = [torch.ones(size, device=device) for size in (count, 1)]
        except (RuntimeError, MemoryError):
            raise UserError(
                f"not enough memory for an allreduce of {4 * count / 1e6:.1f} MB: use a smaller --size."
            ) from None

    def reduce(buffer: torch.Tensor) -> None:
        hvd.allreduce_(buffer, op=hvd.Sum, name=f"hvd_bert.tools.doctor.{buffer.numel()}")
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)

    over = "NCCL, GPU memory" if device.type == "cuda" else {"mpi": "MPI", "gloo": "Gloo"}[world.controller]
    own = _rounds(world, reduce, buffers)
    slowest = np.array(world.allgather(own)).max(axis=0)  # [buffers, repeats]
    return [
        Timing(f"Horovod, {over}", 4 * buffer.numel(), world.size, tuple(times.tolist()))
        for buffer, times in zip(buffers, slowest, strict=True)
    ]


def _rounds(world: World, reduce: Callable[[torch.Tensor], None], buffers: Sequence[torch.Tensor]) -> list[list[float]]:
    """Seconds per call of this rank, [buffers][repeats], after a warm-up round, which checks the sum."""
    own: list[list[float]] = [[] for _ in buffers]
    wrong = False
    for repeat in range(REPEATS + 1):
        for seconds_of, buffer in zip(own, buffers, strict=True):
            calls = SMALL_CALLS if buffer.numel() == 1 and repeat else 1
            buffer.fill_(0.0 if calls > 1 else world.rank + 1.0)  # repeated sums would grow
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)
            world.allgather(None)  # all start together
            start = time.perf_counter()
            for _ in range(calls):
                reduce(buffer)
            if repeat:
                seconds_of.append((time.perf_counter() - start) / calls)
            else:
                wrong |= not bool(torch.all(buffer == world.size * (world.size + 1) / 2))
    with world.raise_on_all_ranks():
        if wrong:
            raise UserError("the sum over the ranks is wrong. Do not train with this installation.")
    return own


def allreduce_table(timings: Sequence[Timing]) -> str:
    """One row per timing."""
    rows = []
    for timing in timings:
        big = timing.num_bytes > 4
        size = f"{timing.num_bytes / 1e6:.1f} MB" if big else f"{timing.num_bytes} bytes"
        spread = f"{seconds(min(timing.seconds))} to {seconds(max(timing.seconds))}"
        rows.append([size, timing.method, seconds(timing.median_s), spread, f"{timing.gb_per_s:.2f}" if big else ""])
    return Grid(["allreduce of", "by", "median", "min to max", "GB/s"], rows, words=2).for_terminal()
