"""What this machine is and has: its processor, the installed versions of packages."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# What a run's speed and numbers depend on.
PACKAGES = ("torch", "horovod", "transformers", "tokenizers", "datasets", "mpi4py", "deepspeed")


def cpu_name() -> str:
    """The processor's model, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def version_of(package: str) -> str | None:
    """The installed version of a package; None: it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
