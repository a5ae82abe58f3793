"""Usage of GPUs, through NVML, the driver's interface, and of this process.

A thread of each rank samples its GPU once a second, without delaying steps. The samples of all ranks are gathered when
metrics are logged. Without GPUs nothing is started or written.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch

from hvd_bert.distributed import logs
from hvd_bert.distributed.world import World
from hvd_bert.storage.reading import GIB
from hvd_bert.storage.writing import JsonLines

FILE = "gpu_usage.jsonl"
PERIOD_S = 1.0


# A sample of a GPU, without values that it does not report (a MIG instance has no utilization).
Sample = dict[str, float]


class NvmlError(Exception):
    """NVML cannot be used here; the message has the reason."""


@contextmanager
def nvml() -> Iterator[Any]:
    """Yield the module pynvml, initialized for the block. Raises NvmlError if it or the driver is missing."""
    try:
        import pynvml
    except ImportError as error:
        raise NvmlError(f"the Python package nvidia-ml-py is missing ({error})") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlError(str(error)) from None
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def find_gpu(module: Any, device_id: str) -> Any:
    """NVML's handle of the GPU or MIG instance whose UUID in torch is `device_id`. Raises NvmlError."""
    for name in (f"GPU-{device_id}", f"MIG-{device_id}", device_id):
        try:
            return module.nvmlDeviceGetHandleByUUID(name)
        except module.NVMLError as error:
            reason = str(error)
    raise NvmlError(f"GPU {device_id}: {reason}")


def take_sample(module: Any, gpu: Any) -> Sample:
    """The GPU's current usage, with the names of the metrics."""
    queries: dict[str, Callable[[], float]] = {
        "gpu_util_percent": lambda: module.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "gpu_memory_gib": lambda: module.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
        "gpu_power_w": lambda: module.nvmlDeviceGetPowerUsage(gpu) / 1000,
    }
    sample = {}
    for name, query in queries.items():
        with suppress(module.NVMLError):
            sample[name] = float(query())
    return sample


def summarise(samples: list[Sample]) -> Sample:
    """Mean utilization and power, and maximum memory."""
    found = {name: [sample[name] for sample in samples if name in sample] for name in chain(*samples)}
    return {
        name: max(values) if name == "gpu_memory_gib" else sum(values) / len(values) for name, values in found.items()
    }


class Sampler:
    """Samples one GPU every PERIOD_S seconds, until closed."""

    def __init__(self, device_id: str) -> None:
        self.problem = ""  # the reason why there are no samples
        self._device_id = device_id
        self._samples: list[Sample] = []
        self._last: list[Sample] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu usage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with nvml() as module:
                gpu = find_gpu(module, self._device_id)
                while True:
                    sample = take_sample(module, gpu)
                    with self._lock:
                        self._samples.append(sample)
                    if self._end.wait(PERIOD_S):
                        return
        except NvmlError as error:
            self.problem = str(error)

    def take(self) -> list[Sample]:
        """The samples since the last call; if there are none, the latest one."""
        with self._lock:
            taken, self._samples = self._samples or self._last, []
        self._last = taken[-1:]
        return taken

    def close(self) -> None:
        """Stop the thread."""
        self._end.set()
        self._thread.join()


class GpuUsage:
    """GPU usage of all ranks, in rank 0's gpu_usage.jsonl; the metrics have rank 0's own GPU."""

    def __init__(self, world: World, folder: Path) -> None:
        """Raises OSError on rank 0 if the file cannot be written."""
        self.world = world
        # The same on all ranks, because `read` is a collective.
        self.enabled = any(info.device_id is not None for info in world.rank_infos)
        self._start = time.monotonic()
        self._file = JsonLines(folder / FILE) if self.enabled and world.rank == 0 else None
        self._samplers = {str(gpu): Sampler(str(torch.cuda.get_device_properties(gpu).uuid)) for gpu in world.gpus}

    def read(self, step: int) -> dict[str, float]:
        """Usage since the last call: gpu_util_percent, gpu_memory_gib and gpu_power_w of rank 0's GPU. A collective.

        Empty without GPUs. Values that NVML does not report are left out.
        """
        if not self.enabled:
            return {}
        mine = [{"device": gpu} | summarise(sampler.take()) for gpu, sampler in self._samplers.items()]
        problem = next((sampler.problem for sampler in self._samplers.values() if sampler.problem), "")
        for sampler in self._samplers.values():
            sampler.problem = ""  # reported once
        seen = self.world.allgather((mine, problem))
        if self.world.rank == 0:
            logs.show([[f"The GPU usage is not recorded: {problem}"] if problem else [] for _, problem in seen])
        if self._file is not None:
            now = {"step": step, "seconds": round(time.monotonic() - self._start, 1)}
            ranks = [{"rank": info.rank, "host": info.host} for info in self.world.rank_infos]
            self._file.write(*(now | rank | row for rank, (rows, _) in zip(ranks, seen, strict=True) for row in rows))
        return {name: value for name, value in seen[0][0][0].items() if name != "device"}

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
    started_s = int(stat.rpartition(")")[2].split()[19]) / os.sysconf(
        "SC_CLK_TCK"
    )  # since boot, a clock that is never set
    return {
        "real_s": round(time.clock_gettime(time.CLOCK_BOOTTIME) - started_s, 3),  # imports included
        "user_s": times.user,
        "system_s": times.system,
        "memory_peak_bytes": memory_peak(device),
    }
