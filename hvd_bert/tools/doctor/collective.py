"""Measure the allreduce of gradients: Horovod's and, in the same run, plain MPI's."""

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
from hvd_bert.rendering.page import Grid
from hvd_bert.rendering.text import seconds
from hvd_bert.tools.doctor.probes import mpi_version
from hvd_bert.tools.doctor.report import OK, WARNING, Line

SMALL_CALLS = 20  # per repeat of the small message, which takes less time than ranks differ at the start
SLOW = 2.0  # times plain MPI's time
SLOW_FROM_BYTES = 10_000_000  # below that, Horovod's cycle of 1 ms matters more than the network


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


def mpi_library(world: World) -> str:
    """Name and version of the MPI that connects the ranks; "" if they do not use MPI."""
    if world.controller != "mpi":
        return ""
    from mpi4py import MPI

    text = " ".join(MPI.Get_library_version().split("\x00")[0].split())
    known = mpi_version(text)
    return " ".join(known) if known else text


def measure(world: World, num_bytes: int, repeats: int) -> list[Timing]:
    """Time allreduces of `num_bytes` and of 4 bytes. A collective. Raises UserError on all ranks if memory is short.

    Horovod and, if it connects the ranks, plain MPI alternate, after a warm-up round. Horovod's buffers are on the
    rank's device, MPI's in host memory.
    """
    import horovod.torch as hvd

    device = world.device if hvd.nccl_built() else torch.device("cpu")
    count = max(1, num_bytes // 4)
    with world.raise_on_all_ranks():
        try:
            buffers = {size: torch.ones(size, device=device) for size in (count, 1)}
            on_host = buffers if device.type == "cpu" else {size: torch.ones(size) for size in (count, 1)}
        except (RuntimeError, MemoryError):
            raise UserError(
                f"not enough memory for an allreduce of {4 * count / 1e6:.1f} MB: use a smaller --size."
            ) from None

    def by_horovod(buffer: torch.Tensor) -> None:
        hvd.allreduce_(buffer, op=hvd.Sum, name=f"hvd_bert.tools.doctor.{buffer.numel()}")
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)

    methods: list[tuple[str, Callable[[Any], None], dict[int, torch.Tensor]]] = []
    over = "NCCL, GPU memory" if device.type == "cuda" else {"mpi": "MPI", "gloo": "Gloo"}[world.controller]
    methods.append((f"Horovod, {over}", by_horovod, buffers))
    comm = None
    if world.controller == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()  # keeps our messages apart from Horovod's

        def by_mpi(buffer: torch.Tensor) -> None:
            assert comm is not None
            comm.Allreduce(MPI.IN_PLACE, buffer.numpy())

        methods.append(("plain MPI, host memory", by_mpi, on_host))
    cases = [(name, reduce, sized[size]) for size in (count, 1) for name, reduce, sized in methods]
    own = _rounds(world, cases, repeats)
    if comm is not None:
        comm.Free()
    slowest = np.array(world.allgather(own)).max(axis=0)  # [cases, repeats]
    return [
        Timing(name, 4 * buffer.numel(), world.size, tuple(times.tolist()))
        for (name, _, buffer), times in zip(cases, slowest, strict=True)
    ]


def _rounds(
    world: World, cases: Sequence[tuple[str, Callable[[Any], None], torch.Tensor]], repeats: int
) -> list[list[float]]:
    """Seconds per call of this rank, [cases][repeats]."""
    own: list[list[float]] = [[] for _ in cases]
    wrong = None
    for repeat in range(repeats + 1):
        for case, (name, reduce, buffer) in enumerate(cases):
            calls = SMALL_CALLS if buffer.numel() == 1 and repeat else 1
            # Zeros, because repeated sums would grow. The warm-up round checks the sum.
            buffer.fill_(0.0 if calls > 1 else world.rank + 1.0)
            if buffer.is_cuda:
                torch.cuda.synchronize(buffer.device)
            world.allgather(None)  # all start together
            start = time.perf_counter()
            for _ in range(calls):
                reduce(buffer)
            if repeat:
                own[case].append((time.perf_counter() - start) / calls)
            elif not bool(torch.all(buffer == world.size * (world.size + 1) / 2)):
                wrong = name
    with world.raise_on_all_ranks():
        if wrong:
            raise UserError(f"the sum over the ranks is wrong ({wrong}). Do not train with this installation.")
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


def allreduce_line(timings: Sequence[Timing]) -> Line:
    """Whether the allreduce is as fast as expected."""
    largest = max(timing.num_bytes for timing in timings)
    own, *plain = [timing for timing in timings if timing.num_bytes == largest]
    found = f"correct sums; {largest / 1e6:.1f} MB in {seconds(own.median_s)}"
    if plain and largest >= SLOW_FROM_BYTES and own.median_s > SLOW * plain[0].median_s:
        return Line(
            "Allreduce",
            WARNING,
            f"{found}, {own.median_s / plain[0].median_s:.1f} times as long as plain MPI",
            "Rerun with nothing else on the hosts. If it stays, give each rank 2 cores or more (Horovod has its own"
            " thread), and check how ranks are bound to cores.",
        )
    return Line("Allreduce", OK, found)
