"""The machine's processor and free memory, and the versions of installed packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

# Packages that affect a run's speed or its results.
PACKAGES = ("torch", "horovod", "transformers", "tokenizers", "datasets", "mpi4py", "deepspeed")


def cpu_name() -> str:
    """The processor's model name, or its architecture if the model is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version_of(package: str) -> str | None:
    """The installed version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def free_memory() -> int:
    """Bytes of free memory on the host or, if less, in the job's cgroup."""
    free = int(psutil.virtual_memory().available)
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        groups = []  # not Linux
    for line in groups:
        if line.startswith("0::"):  # version 2
            free = min([free, *_cgroup_free(Path("/sys/fs/cgroup") / line[3:].lstrip("/"))])
    return free


def _cgroup_free(folder: Path) -> list[int]:
    """Free bytes under the limits of a cgroup and its parents. Cached files count as free: the kernel drops them."""
    free = []
    for group in (folder, *folder.parents):
        try:
            maximum = (group / "memory.max").read_text(encoding="ascii").strip()
            used = int((group / "memory.current").read_text(encoding="ascii"))
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        except OSError:
            continue  # no limit here
        if maximum != "max":
            cached = int(stat["active_file"]) + int(stat["inactive_file"])
            free.append(max(0, int(maximum) - used + cached))
    return free
