"""Facts of this host, found without judging them. What could crash or hang is asked in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hvd_bert.errors import UserError
from hvd_bert.monitoring.gpu_usage import NvmlError, nvml

COMMAND_TIMEOUT_S = 20.0
IMPORT_TIMEOUT_S = 90.0  # of torch and Horovod, from a cold network file system

_LIBRARIES = """
import json, re
def libraries():
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    return sorted(path for path in paths if re.search(r"/lib(mpi|mpich|mpi_cray|nccl)\\.so", path))
"""
_HOROVOD = f"""{_LIBRARIES}
import horovod, horovod.torch as hvd
built = {{name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl")}}
print(json.dumps({{"version": horovod.__version__, **built, "libraries": libraries()}}))
"""
# Not initialised: on the login nodes of some clusters MPI refuses to start.
_MPI4PY = f"""{_LIBRARIES}
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
version = " ".join(MPI.Get_library_version().split("\\0")[0].split())
print(json.dumps({{"version": version, "libraries": libraries()}}))
"""


class ProbeError(UserError):
    """A fact cannot be had; the message says why."""


@dataclass(frozen=True)
class HorovodBuild:
    """What Horovod was built with, and the files of the MPI and NCCL that it loads."""

    version: str
    mpi: bool
    gloo: bool
    nccl: bool
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI that mpi4py loads: what it calls itself, and its file."""

    version: str
    libraries: tuple[str, ...]


@dataclass(frozen=True)
class Gpus:
    """What the driver says of this host: its version, the newest CUDA that it runs, and the GPUs' names."""

    driver: str
    cuda: str
    names: tuple[str, ...]


def output_of(words: list[str], timeout: float = COMMAND_TIMEOUT_S) -> str:
    """What a command wrote. Raises ProbeError if it is not there, fails or does not end in `timeout` seconds."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"`{_short(words)}` did not answer within {timeout:.0f} s") from None
    except OSError as error:
        raise ProbeError(f"`{_short(words)}` cannot be run: {error.strerror or error}") from None
    text = done.stdout.decode("utf-8", errors="replace")
    if done.returncode != 0:
        lines = text.strip().splitlines()
        end = f"died by signal {-done.returncode}" if done.returncode < 0 else f"ended with status {done.returncode}"
        raise ProbeError(f"`{_short(words)}` {end}" + (f": {lines[-1]}" if lines else ""))
    return text


def _short(words: list[str]) -> str:
    return " ".join("..." if "\n" in word else Path(word).name if word == words[0] else word for word in words)


def _imported(program: str) -> dict[str, object]:
    lines = output_of([sys.executable, "-c", program], IMPORT_TIMEOUT_S).strip().splitlines()
    found = json.loads(lines[-1])  # libraries may have written above it
    assert isinstance(found, dict)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


@cache
def horovod() -> HorovodBuild | ProbeError:
    """Horovod's build; several checks ask."""
    try:
        return HorovodBuild(**_imported(_HOROVOD))  # type: ignore[arg-type]  # as the program above prints it
    except ProbeError as error:
        return error


@cache
def mpi4py() -> MpiLibrary | ProbeError:
    """mpi4py's MPI."""
    try:
        return MpiLibrary(**_imported(_MPI4PY))  # type: ignore[arg-type]
    except ProbeError as error:
        return error


@cache
def gpus() -> Gpus | NvmlError:
    """What NVML tells of the driver and the GPUs, or why it tells nothing."""
    try:
        with nvml() as module:
            handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]
            cuda = module.nvmlSystemGetCudaDriverVersion_v2()
            names = tuple(str(module.nvmlDeviceGetName(handle)) for handle in handles)
            return Gpus(str(module.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", names)
    except NvmlError as error:
        return error


@dataclass(frozen=True)
class Slurm:
    """Version of Slurm, and the kinds of MPI that `srun --mpi=` knows."""

    version: str
    mpi_kinds: tuple[str, ...]


def slurm() -> Slurm | ProbeError | None:
    """None where there is no srun."""
    if shutil.which("srun") is None:
        return None
    try:
        return Slurm(output_of(["srun", "--version"]).strip(), mpi_kinds(output_of(["srun", "--mpi=list"])))
    except ProbeError as error:
        return error


def mpi_kinds(listed: str) -> tuple[str, ...]:
    """From what `srun --mpi=list` prints, in the ways of Slurm 20 to 25."""
    return tuple(dict.fromkeys(re.findall(r"\b(?:pmix\w*|pmi2|openmpi|cray_shasta)\b", _without_prose(listed))))


def _without_prose(listed: str) -> str:
    return "\n".join(line for line in listed.splitlines() if not line.lower().rstrip().endswith("are..."))


def mpirun() -> tuple[str, str] | None:
    """Path of mpirun and what it says of its version; None where there is none. Raises ProbeError."""
    path = shutil.which("mpirun")
    return (path, output_of([path, "--version"])) if path else None


def mpi_version(text: str) -> tuple[str, str] | None:
    """Family and version of an MPI, from what its mpirun or its library says of itself."""
    patterns = {
        "Open MPI": r"Open MPI\)? v?(\d[\w.]*)",
        "Intel MPI": r"Intel\(R\) MPI Library(?:.*?Version)? (\d+\.\d+)",
        "MVAPICH": r"MVAPICH\d?.*?Version\s*:\s*(\d[\w.]*)",
        "MPICH": r"(?:MPICH|HYDRA).*?Version\s*:\s*(\d[\w.]*)",
    }
    for family, pattern in patterns.items():
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return family, found[1]
    return None


def free_memory() -> int:
    """Bytes that this process may still take: of the host, or of the job's cgroup if that has less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        if line.startswith("0::"):  # version 2
            free = min([free, *_cgroup_free(Path("/sys/fs/cgroup") / line[3:].lstrip("/"))])
    return free


def _cgroup_free(folder: Path) -> list[int]:
    """What the limits of a cgroup and those around it leave."""
    left = []
    for group in (folder, *folder.parents):
        try:
            maximum = (group / "memory.max").read_text(encoding="ascii").strip()
            used = int((group / "memory.current").read_text(encoding="ascii"))
        except OSError:
            continue  # no limit here
        if maximum != "max":
            left.append(max(0, int(maximum) - used))
    return left


def cuda_hidden() -> bool:
    """Whether the user hides the GPUs on purpose."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
