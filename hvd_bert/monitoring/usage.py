"""Usage of GPUs and of this process.

A thread of each rank samples its GPU once a second, without delaying steps. The samples of all ranks are gathered when
metrics are logged. Without GPUs nothing is started or written.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

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


class Sampler:
    """Samples one GPU every PERIOD_S seconds, until closed."""

    def __init__(self, gpu: torch.device) -> None:
        self._gpu = gpu
        self._samples: list[Sample] = []
        self._last: list[Sample] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu usage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self._samples.append(take_sample(self._gpu))
            if self._end.wait(PERIOD_S):
                return

    def take(self) -> list[Sample]:
        """The samples since the last call; if there are none, the latest one."""
        taken = self._samples[:]  # the thread only appends
        del self._samples[: len(taken)]
        self._last = taken[-1:] or self._last
        return taken or self._last

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()
        self._thread.join()


class GpuUsage:
    """GPU usage of all ranks, in rank 0's gpu_usage.jsonl; the metrics have rank 0's own GPU."""

    def __init__(self, world: World, folder: Path) -> None:
        """Raises OSError on rank 0 if the file cannot be written."""
        self.world = world
        self._start = time.monotonic()
        self._file = JsonLines(folder / FILE) if world.gpus and world.rank == 0 else None
        self._samplers = {str(gpu): Sampler(gpu) for gpu in world.gpus}

    def read(self, step: int) -> dict[str, float]:
        """Usage since the last call: gpu_util_percent, gpu_memory_gib and gpu_power_w of rank 0's GPU. A collective.

        Empty without GPUs. Values that torch does not report are left out.
        """
        if not self.world.gpus:  # the same on all ranks
            return {}
        mine = [{"device": gpu} | summarise(sampler.take()) for gpu, sampler in self._samplers.items()]
        seen = self.world.allgather(mine)
        if self._file is not None:
            now = {"step": step, "seconds": round(time.monotonic() - self._start, 1)}
            ranks = [{"rank": info.rank, "host": info.host} for info in self.world.rank_infos]
            self._file.write(*(now | rank | row for rank, rows in zip(ranks, seen, strict=True) for row in rows))
        return {name: value for name, value in seen[0][0].items() if name != "device"}

    def close(self) -> None:
        """Stop the thread and close the file."""
        for sampler in self._samplers.values():
            sampler.close()
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
    """Have `memory_peak` count from now on, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory_now(device: torch.device) -> int:
    """Current memory in bytes, counted as by `memory_peak`."""
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
