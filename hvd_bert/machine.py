"""The machine's processor and the versions of installed packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
