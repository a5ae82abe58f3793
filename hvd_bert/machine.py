"""The machine's processor, memory and CPU limit, and the versions of installed packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from hvd_bert.version import __version__

MAX_THREADS = 1024  # per process: more take seconds to start, and a million cause a segmentation fault
CPUINFO = Path("/proc/cpuinfo")
# Packages that affect a run's speed or its results.
PACKAGES = ("torch", "horovod", "transformers", "tokenizers", "datasets", "mpi4py", "deepspeed")


def cpu_name() -> str:
    """Return the processor's model name, or its architecture if the model is unknown."""
    return cpuinfo().get("model name", platform.machine())


def host_facts() -> dict[str, Any]:
    """Return this host's processor name, number of cores and memory in bytes."""
    return {"processor": cpu_name(), "cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total}


def cpuinfo() -> dict[str, str]:
    """Parse the first processor's entries in CPUINFO."""
    lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_flags(entries: Mapping[str, str] | None = None) -> set[str]:
    """Return the instruction-set flags in `entries`, as returned by `cpuinfo`. Default: this machine's processor."""
    entries = cpuinfo() if entries is None else entries
    return set(entries.get("flags", entries.get("Features", "")).split())


def package_version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of this package, Python and PACKAGES; None for a package that is not installed."""
    found = {"hvd_bert": __version__, "python": platform.python_version()}
    return found | {package: package_version(package) for package in PACKAGES}


def free_memory() -> int:
    """Return the free memory in bytes: the host's or, if smaller, the cgroup's. Cached files count as free."""
    free = [int(psutil.virtual_memory().available)]
    for maximum, used, lines in _cgroup_files("memory.max", "memory.current", "memory.stat"):
        if maximum.strip() != "max":
            stat = dict(line.split() for line in lines.splitlines())
            cached = int(stat["active_file"]) + int(stat["inactive_file"])  # the kernel frees these if needed
            free.append(max(0, int(maximum) - int(used) + cached))
    return min(free)


def total_memory() -> int:
    """Return the total memory in bytes: the host's or, if smaller, the cgroup's limit."""
    limits = (text.strip() for [text] in _cgroup_files("memory.max"))
    return min([int(psutil.virtual_memory().total), *(int(limit) for limit in limits if limit != "max")])


def cpu_limit() -> float | None:
    """Return the cgroup's CPU limit in cores, such as that of a container; None without a limit."""
    limits = (text.split() for [text] in _cgroup_files("cpu.max"))
    return min((int(quota) / int(period) for quota, period in limits if quota != "max"), default=None)


def _cgroup() -> Path:
    """Return the folder of this process's cgroup or, under cgroup v1, /sys/fs/cgroup."""
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    return Path("/sys/fs/cgroup") / own


def _cgroup_files(*names: str) -> Iterator[list[str]]:
    """Yield the contents of the named files for this process's cgroup and for each parent that has all of them."""
    folder = _cgroup()
    for group in (folder, *folder.parents):
        with suppress(OSError):  # this cgroup lacks a file
            yield [(group / name).read_text(encoding="ascii") for name in names]
