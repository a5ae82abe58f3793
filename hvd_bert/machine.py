"""The machine's processor and free memory, and the versions of installed packages."""

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

MAX_THREADS = 1024  # per process: starting more takes seconds, and a million end it with a segmentation fault
CPUINFO = Path("/proc/cpuinfo")
# Packages that affect a run's speed or its results.
PACKAGES = ("torch", "horovod", "transformers", "tokenizers", "datasets", "mpi4py", "deepspeed")


def cpu_name() -> str:
    """The processor's model name, or its architecture if the model is unknown."""
    return cpuinfo().get("model name", platform.machine())


def host_facts() -> dict[str, Any]:
    """Describe this host's processor, cores and memory."""
    return {"processor": cpu_name(), "cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total}


def cpuinfo() -> dict[str, str]:
    """Read the first processor's entries of CPUINFO."""
    lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def cpu_flags(entries: Mapping[str, str] | None = None) -> set[str]:
    """The instruction sets of a processor, by its `entries` of CPUINFO; None: of this machine's."""
    entries = cpuinfo() if entries is None else entries
    return set(entries.get("flags", entries.get("Features", "")).split())


def package_version(package: str) -> str | None:
    """The installed version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """The versions of this package, Python and PACKAGES; None for a package that is not installed."""
    found = {"hvd_bert": __version__, "python": platform.python_version()}
    return found | {package: package_version(package) for package in PACKAGES}


def free_memory() -> int:
    """Bytes of free memory on the host or, if less, in the job's cgroup. Cached files count as free."""
    free = [int(psutil.virtual_memory().available)]
    for maximum, used, lines in _cgroup_files("memory.max", "memory.current", "memory.stat"):
        if maximum.strip() != "max":
            stat = dict(line.split() for line in lines.splitlines())
            cached = int(stat["active_file"]) + int(stat["inactive_file"])  # the kernel drops them if memory is short
            free.append(max(0, int(maximum) - int(used) + cached))
    return min(free)


def total_memory() -> int:
    """Bytes of memory of the host or, if less, of the job's cgroup."""
    limits = (text.strip() for [text] in _cgroup_files("memory.max"))
    return min([int(psutil.virtual_memory().total), *(int(limit) for limit in limits if limit != "max")])


def cpu_limit() -> float | None:
    """The job's limit on CPU time by its cgroup (a container's limit on CPUs), in cores; None without a limit."""
    limits = (text.split() for [text] in _cgroup_files("cpu.max"))
    return min((int(quota) / int(period) for quota, period in limits if quota != "max"), default=None)


def _cgroup() -> Path:
    """The folder of this process's cgroup; under version 1, the folder of all cgroups."""
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    return Path("/sys/fs/cgroup") / own


def _cgroup_files(*names: str) -> Iterator[list[str]]:
    """Read the named files of this process's cgroup and of its parents, where they exist."""
    folder = _cgroup()
    for group in (folder, *folder.parents):
        with suppress(OSError):  # no limit here
            yield [(group / name).read_text(encoding="ascii") for name in names]
