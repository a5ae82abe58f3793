"""What this process has cost so far: time, processor time, memory."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import psutil
import torch


def seconds_since_start() -> float:
    """Since this process was started, its interpreter and imports included."""
    return time.time() - float(psutil.Process(os.getpid()).create_time())


def memory_peak(device: torch.device) -> int:
    """Bytes: the most that this process held; on a GPU the most that its tensors held there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Not getrusage's ru_maxrss, which a process takes over from the one that started it.
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def memory_now(device: torch.device) -> int:
    """Bytes held now, as `memory_peak` counts them."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(psutil.Process(os.getpid()).memory_info().rss)


def process_usage(device: torch.device) -> dict[str, float]:
    """Of the whole process until now: `real_s`, `user_s`, `system_s` as the shell's `time` has them, and
    `memory_peak_bytes` (`memory_peak`)."""
    times = os.times()
    return {
        "real_s": round(seconds_since_start(), 3),
        "user_s": times.user,
        "system_s": times.system,
        "memory_peak_bytes": memory_peak(device),
    }
