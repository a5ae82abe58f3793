"""Measure the host's time to launch a step and the GPU's time to compute it. The faster of the two waits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch.profiler import profile

from hvd_bert.config.settings import Config
from hvd_bert.distributed.world import World
from hvd_bert.output.callback import Callback
from hvd_bert.tasks.base import MicroBatch

# Prefixes of the CUDA calls that launch kernels, graphs and copies.
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
KERNEL_ROWS = 10
# name -> label and format
FIGURES = {
    "host_ms_per_step": ("milliseconds until the host has started a step", "{:.1f}"),
    "gpu_busy_ms_per_step": ("milliseconds of a step's kernels and copies", "{:.1f}"),
    "launches_per_step": ("launches per step: kernels, graphs, copies", "{:,}"),
}


def measurable(config: Config, world: World) -> bool:
    """Whether `HostTimer` can measure: one rank on one GPU (several would wait for each other), without --profile."""
    alone = world.size * world.devices == 1
    return world.device.type == "cuda" and alone and not config.profiling.steps_to_record


def figures(host_s: Sequence[float], events: Sequence[Any]) -> dict[str, Any]:
    """Compute FIGURES (None if not measured), and list the longest kernels and copies.

    `host_s`: seconds that the host needed to launch each measured step. `events`: a profile's key_averages().
    """
    rows, launches = [], 0
    for event in events:
        seconds = event.self_device_time_total / 1e6
        if event.device_type.name == "CPU":
            launches += event.count if event.key.startswith(LAUNCHES) else 0
        # Skip annotations such as "Optimizer.step": the kernels inside have their own rows.
        elif seconds and not getattr(event, "is_user_annotation", False):
            rows.append({"name": event.key, "calls": event.count, "seconds": seconds})
    rows.sort(key=lambda row: -row["seconds"])
    busy_s = sum(row["seconds"] for row in rows)
    found = (1000 * median(host_s) if host_s else None, 1000 * busy_s or None, launches or None)
    return {**dict(zip(FIGURES, found, strict=True)), "kernels": rows[:KERNEL_ROWS]}


def advice(found: Mapping[str, float | None], captures_graphs: bool) -> str | None:
    """Return a line of advice if the GPU waits for the host, else None. `captures_graphs`: see TrainArguments."""
    host_ms, busy_ms, count = (found[name] for name in FIGURES)
    if host_ms is None or busy_ms is None or host_ms <= busy_ms:
        return None
    remedy = "Raise" if captures_graphs else "Add --torch_compile_mode reduce-overhead, or raise"
    return (
        f"The GPU waits for the host: a step's {count or 0:,} launches take the host {host_ms:.1f} ms, their work takes"
        f" the GPU {busy_ms:.1f} ms. {remedy} --per_device_train_batch_size."
    )


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Context manager: record the operations that make the host wait for the GPU, except waits for CUDA events.

    Yields a list. After the block, it has a FILE:LINE for each of these operations.
    """
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = [warning for warning in seen if "synchronizing CUDA operation" in str(warning.message)]
    waits += [f"{warning.filename}:{warning.lineno}" for warning in found]


class HostTimer(Callback):
    """Measures the host's launch times and waits in the second half of the first section, and profiles a step.

    `section`: number of steps per section. `last`: the step to profile. No measured step may follow, because a profile
    slows down launches until the process ends.
    """

    def __init__(self, section: int, last: int) -> None:
        self._steps, self._last = {*range(section // 2 + 1, section + 1), last}, last
        self._step, self._start = 1, 0.0  # current step, and its start time (0: not started or not measured)
        self._host_s: list[float] = []
        self._profile, self._counting = profile(), ExitStack()
        self._section, self._waits = section, list[str]()

    def on_batch(self, batch: MicroBatch) -> None:
        if self._start or self._step not in self._steps:
            return
        torch.cuda.synchronize()  # so that the step does not wait for earlier work
        if self._step == self._section // 2 + 1:
            self._waits = self._counting.enter_context(counted_waits())
        if self._step == self._last:
            self._profile.start()
        self._start = time.perf_counter()

    def on_step(self, step: int) -> None:
        if step == self._last:
            torch.cuda.synchronize()
            self._profile.stop()
        elif self._start:
            self._host_s.append(time.perf_counter() - self._start)
        # The section is logged after `on_step` of the next step; count the waits for logging, too.
        if step == self._section + 2:
            self._counting.close()
        self._step, self._start = step + 1, 0.0

    def figures(self) -> dict[str, Any]:
        """Return all figures, with the longest kernels and the waits. Called after the last step."""
        return {**figures(self._host_s, self._profile.key_averages()), "host_waits": self._waits}
