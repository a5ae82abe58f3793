"""Resource usage: GPU utilization, memory and power, and this process's time and memory."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch

from hvd_bert.distributed.world import World
from hvd_bert.storage.reading import GIB
from hvd_bert.storage.writing import JsonLines

FILE = "gpu_usage.jsonl"
PERIOD_S = 1.0  # seconds between two samples

Sample = dict[str, float]  # a GPU's usage by metric name: gpu_memory_gib, gpu_util_percent, gpu_power_w


def take_sample(gpu: torch.device) -> Sample:
    """Measure a GPU's memory, utilization and power, up to the first metric that torch does not report."""
    sample = {}
    with suppress(Exception):  # a MIG instance has no utilization; NVML or its package nvidia-ml-py may be missing
        free, total = torch.cuda.mem_get_info(gpu)
        sample["gpu_memory_gib"] = (total - free) / GIB
        sample["gpu_util_percent"] = float(torch.cuda.utilization(gpu))
        sample["gpu_power_w"] = torch.cuda.power_draw(gpu) / 1000
    return sample


def summarise(samples: list[Sample]) -> Sample:
    """Return the samples' mean utilization and power, and their maximum memory."""
    found = {name: [sample[name] for sample in samples if name in sample] for name in chain(*samples)}
    return {
        name: max(values) if name == "gpu_memory_gib" else sum(values) / len(values) for name, values in found.items()
    }


def energy_j(gpus: Sequence[torch.device]) -> float:
    """Return the joules that GPUs have used since their driver was loaded, by their own counters.

    NaN without GPUs, or if one has no counter, as before Volta. The counter of a MIG instance's GPU counts for all
    instances, so that gives NaN, too.
    """
    if not gpus:
        return math.nan
    with suppress(Exception):  # NVML or its package nvidia-ml-py may be missing
        import pynvml

        pynvml.nvmlInit()
        found = [torch.cuda.get_device_properties(gpu) for gpu in gpus]
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}") for gpu in found if "MIG" not in gpu.name]
        if len(handles) == len(gpus):
            return float(sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1000
    return math.nan


class GpuUsage:
    """Records the GPU usage of all ranks in gpu_usage.jsonl. metrics.jsonl has the usage of rank 0's first GPU only.

    On each rank, a thread samples the rank's GPUs once per second. Without GPUs, it is not started.
    """

    def __init__(self, world: World, folder: Path) -> None:
        """Start sampling. Raises OSError on rank 0 if the file cannot be written."""
        self.world = world
        self._start = time.monotonic()
        self._samples: dict[torch.device, list[Sample]] = {gpu: [] for gpu in world.gpus}
        self._file = JsonLines(folder / FILE) if self._samples and world.rank == 0 else None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="gpu usage", daemon=True)
        if self._samples:
            self._thread.start()

    def _sample(self) -> None:
        while True:
            for gpu, samples in self._samples.items():
                samples.append(take_sample(gpu))
            if self._end.wait(PERIOD_S):
                return

    def read(self, step: int) -> dict[str, float]:
        """Append to gpu_usage.jsonl the usage of all GPUs since the last call. A collective.

        Returns the usage of rank 0's first GPU for metrics.jsonl; empty without GPUs.
        """
        if not self._samples:  # then no rank has a GPU, so all ranks return here
            return {}
        rows: list[dict[str, Any]] = []
        for gpu, samples in self._samples.items():
            taken = samples[:]  # the thread only appends
            del samples[: len(taken) - 1]  # the last sample stays: there may be no newer one at the next call
            rows.append({"device": str(gpu)} | summarise(taken[1:] or taken))
        gathered = self.world.allgather(rows)
        if self._file is not None:
            now = {"step": step, "seconds": round(time.monotonic() - self._start, 1)}
            ranks = [{"rank": info.rank, "host": info.host} for info in self.world.rank_infos]
            self._file.write(*(now | rank | row for rank, own in zip(ranks, gathered, strict=True) for row in own))
        return {name: value for name, value in gathered[0][0].items() if name != "device"}

    def close(self) -> None:
        """Stop the thread and close the file."""
        self._end.set()
        if self._samples:
            self._thread.join()
        if self._file is not None:
            self._file.close()


def memory_peak(device: torch.device) -> int:
    """Return this process's peak memory in bytes: its resident set or, for a GPU, its tensors on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage's ru_maxrss is unsuitable, since a process inherits it from its parent.
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def reset_memory_peak(device: torch.device) -> None:
    """Reset `memory_peak` to the current memory, if the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory_now(device: torch.device) -> int:
    """Return this process's current memory in bytes: its resident set or, for a GPU, its tensors on the GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process(os.getpid()).memory_info().rss)


def process_usage(device: torch.device) -> dict[str, float]:
    """Return the process's usage since its start: the times that the shell's `time` reports, and the peak memory."""
    times = os.times()
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    started_ticks = int(stat.rpartition(")")[2].split()[19])  # ticks since boot, like CLOCK_BOOTTIME
    started_s = started_ticks / os.sysconf("SC_CLK_TCK")
    return {
        "real_s": round(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 3),  # imports included
        "user_s": times.user,
        "system_s": times.system,
        "memory_peak_bytes": memory_peak(device),
    }
