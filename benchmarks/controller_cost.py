"""Measures the CPU time that averaging a model's gradients takes, over MPI or Gloo: a rank of horovodrun.

    horovodrun -np 2 --gloo python benchmarks/controller_cost.py
    HOROVOD_FUSION_THRESHOLD=1048576 horovodrun -np 2 --gloo python benchmarks/controller_cost.py

Each step sends the gradients of MiniLM (6 layers, hidden size 384, 90 MB), ten at a time with pauses in between, as a
backward pass does, and waits as the trainer does. Prints a line per rank: CPU milliseconds of its threads per step.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

STEPS = 10
PAUSE_S = 0.02
HIDDEN = 384
SHAPES = [
    *[(30522, HIDDEN), (512, HIDDEN), (2, HIDDEN)], *[(HIDDEN, HIDDEN)] * 24, *[(4 * HIDDEN, HIDDEN)] * 6,
    *[(HIDDEN, 4 * HIDDEN)] * 6, *[(HIDDEN,)] * 60, *[(4 * HIDDEN,)] * 6,
]  # fmt: skip


def thread_times() -> dict[str, float]:
    """CPU milliseconds of each of this process's threads until now."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "schedstat").read_text(encoding="utf-8").split()[0]) / 1e6 for task in tasks}


def main() -> None:
    """The measurement on one rank."""
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # as the trainer on CPUs
    import horovod.torch as hvd
    import torch

    hvd.init()
    sleeps = os.environ.get("HOROVOD_CONTROLLER", "mpi").lower() == "gloo"
    gradients = [torch.ones(shape) for shape in reversed(SHAPES)]

    def step() -> None:
        handles = []
        for number, gradient in enumerate(gradients):
            handles.append(hvd.allreduce_async_(gradient, op=hvd.Average, name=f"gradient {number}"))
            if number % 10 == 0:
                time.sleep(PAUSE_S)  # the backward pass of the next layers
        for handle in handles:
            while sleeps and not hvd.poll(handle):
                time.sleep(5e-5)
            hvd.synchronize(handle)

    for _ in range(3):  # warm-up
        step()
    before, start = thread_times(), time.perf_counter()
    for _ in range(STEPS):
        step()
    seconds, after = time.perf_counter() - start, thread_times()
    used = sorted(((after[thread] - before.get(thread, 0.0)) / STEPS for thread in after), reverse=True)
    threads = ", ".join(f"{each:.0f}" for each in used[:4])
    print(f"rank {hvd.rank()}: {sum(used):.0f} ms per step ({threads}), {seconds / STEPS:.2f} s per step", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
