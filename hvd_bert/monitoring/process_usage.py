"""Time, CPU time and memory of this process."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil
import torch


def seconds_since_start() -> float:
    """Seconds since this process started, including the interpreter's start and imports."""
    return time.time() - float(psutil.Process(os.getpid()).create_time())


def memory_peak(device: torch.device) -> int:
    """Peak memory of this process in bytes; on a GPU the peak of its tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage's ru_maxrss, which a process inherits from its parent.
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def memory_now(device: torch.device) -> int:
    """Current memory in bytes, counted as by `memory_peak`."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process(os.getpid()).memory_info().rss)


def process_usage(device: torch.device) -> dict[str, float]:
    """Usage of the whole process until now: `real_s`, `user_s` and `system_s` as in the shell's `time`, and
    `memory_peak_bytes`."""
    times = os.times()
    return {
        "real_s": round(seconds_since_start(), 3),
        "user_s": times.user,
        "system_s": times.system,
        "memory_peak_bytes": memory_peak(device),
    }
