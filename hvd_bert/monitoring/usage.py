"""Usage of GPUs and of this process."""

from __future__ import annotations

import os
import re
import threading
import time
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
PERIOD_S = 1.0

Sample = dict[str, float]  # current usage of a GPU, by the names of the metrics


def take_sample(gpu: torch.device) -> Sample:
    """Measure a GPU's current usage, as far as torch reports it."""
    sample = {}
    with suppress(Exception):  # a MIG instance has no utilization; NVML or its package nvidia-ml-py may be missing
        free, total = torch.cuda.mem_get_info(gpu)
        sample["gpu_memory_gib"] = (total - free) / GIB
        sample["gpu_util_percent"] = float(torch.cuda.utilization(gpu))
        sample["gpu_power_w"] = torch.cuda.power_draw(gpu) / 1000
    return sample


def summarise(samples: list[Sample]) -> Sample:
    """Mean utilization and power, and maximum memory."""
    found = {name: [sample[name] for sample in samples if name in sample] for name in chain(*samples)}
    return {
        name: max(values) if name == "gpu_memory_gib" else sum(values) / len(values) for name, values in found.items()
    }


class GpuUsage:
    """Records GPU usage of all ranks in gpu_usage.jsonl, on rank 0. metrics.jsonl has rank 0's GPU only.

    A thread of each rank samples its GPUs once a second, without delaying steps. Without GPUs nothing is started.
    """

    def __init__(self, world: World, folder: Path) -> None:
        """Raises OSError on rank 0 if the file cannot be written."""
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
        """gpu_util_percent, gpu_memory_gib and gpu_power_w of rank 0's GPU since the last call. A collective.

        Empty without GPUs. Values that torch does not report are left out.
        """
        if not self._samples:  # on all ranks: either all have a GPU or none has
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
    """Peak memory of this process in bytes; on a GPU the peak of its tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage's ru_maxrss, which a process inherits from its parent.
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def reset_memory_peak(device: torch.device) -> None:
    """Restart the measurement of `memory_peak`, if the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory_now(device: torch.device) -> int:
    """Current memory of this process in bytes; on a GPU that of its tensors."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process(os.getpid()).memory_info().rss)


def process_usage(device: torch.device) -> dict[str, float]:
    """Usage of the whole process until now: `real_s`, `user_s` and `system_s` as in the shell's `time`, and
    `memory_peak_bytes`."""
    times = os.times()
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    started_ticks = int(stat.rpartition(")")[2].split()[19])  # since boot, a clock that is never set
    started_s = started_ticks / os.sysconf("SC_CLK_TCK")
    return {
        "real_s": round(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 3),  # imports included
        "user_s": times.user,
        "system_s": times.system,
        "memory_peak_bytes": memory_peak(device),
    }
