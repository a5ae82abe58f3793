"""Collect facts about this host without judging them. Calls that may crash or hang run in a subprocess."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hvd_bert.distributed.slurm import find_job
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import convert, parse_json

COMMAND_TIMEOUT_S = 20.0
IMPORT_TIMEOUT_S = 90.0  # for torch and Horovod on a cold network file system

_HOROVOD = """
import json, horovod, horovod.torch as hvd
built = {name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl")}
print(json.dumps({"version": horovod.__version__, **built}))
"""
# Does not initialize MPI: this fails on the login nodes of some clusters.
_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(" ".join(MPI.Get_library_version().split("\\0")[0].split()))
"""


@dataclass(frozen=True)
class HorovodBuild:
    """Horovod's version and the libraries that it was built with; only the `error` if it cannot be imported."""

    version: str = ""
    mpi: bool = False
    gloo: bool = False
    nccl: bool = False
    error: str = ""


@dataclass(frozen=True)
class Gpus:
    """Driver version, newest CUDA version that the driver supports, and GPU models; only the `error` if NVML fails."""

    driver: str = ""
    cuda: str = ""
    names: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Slurm:
    """Slurm's version, and the MPI kinds that `srun --mpi=` supports; only the `error` if a command fails.

    `absent`: the reason why this host does not belong to a Slurm cluster; "" if it does.
    """

    version: str = ""
    mpi_kinds: tuple[str, ...] = ()
    error: str = ""
    absent: str = ""

    @property
    def pmix(self) -> str:
        """The first PMIx kind, for `srun --mpi=`; "" if PMIx is not supported."""
        return next((kind for kind in self.mpi_kinds if kind.startswith("pmix")), "")


def run_command(command: list[str], timeout: float = COMMAND_TIMEOUT_S) -> str:
    """Run a command and return its stdout and stderr as one text.

    Raises UserError if the command is missing, fails or takes more than `timeout` seconds.
    """
    shown = " ".join([Path(command[0]).name, *("..." if "\n" in word else word for word in command[1:])])
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"`{shown}` did not finish within {timeout:.0f} s") from None
    except OSError as error:
        raise UserError(f"`{shown}` cannot be started: {error.strerror or error}") from None
    text = done.stdout.decode("utf-8", errors="replace")
    if done.returncode != 0:
        lines = text.strip().splitlines()
        end = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"exited with {done.returncode}"
        raise UserError(f"`{shown}` {end}" + (f": {lines[-1]}" if lines else ""))
    return text


def _last_line(program: str) -> str:
    """Run a Python program and return the last line it prints; libraries may print others first. Raises UserError."""
    return run_command([sys.executable, "-c", program], IMPORT_TIMEOUT_S).strip().splitlines()[-1]


@cache
def horovod() -> HorovodBuild:
    """Import Horovod in a subprocess, and return its version and build."""
    try:
        return convert(parse_json(_last_line(_HOROVOD)), HorovodBuild)
    except UserError as error:
        return HorovodBuild(error=str(error))


def mpi4py() -> str:
    """Return the version text of the MPI library that mpi4py uses. Raises UserError."""
    return _last_line(_MPI4PY)


@cache
def gpus() -> Gpus:
    """Query the driver and GPUs through NVML."""
    try:
        import pynvml
    except ImportError as error:
        return Gpus(error=f"the Python package nvidia-ml-py is missing ({error})")
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        names = tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
        return Gpus(str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", names)
    except pynvml.NVMLError as error:
        return Gpus(error=str(error))


@cache
def slurm() -> Slurm:
    """Query Slurm's version and MPI kinds. Outside a job, first check that the cluster responds to sinfo."""
    if shutil.which("srun") is None:
        return Slurm(absent="not found (no srun on PATH)")
    try:
        if find_job(os.environ) is None and shutil.which("sinfo"):
            run_command(["sinfo", "--noheader"])
        return Slurm(run_command(["srun", "--version"]).strip(), mpi_kinds(run_command(["srun", "--mpi=list"])))
    except UserError as error:
        configured = "configuration" not in str(error) or find_job(os.environ)
        return Slurm(error=str(error)) if configured else Slurm(absent=f"installed, but not configured ({error})")


def mpi_kinds(listed: str) -> tuple[str, ...]:
    """Parse the MPI kinds in the output of `srun --mpi=list`, in the formats of Slurm 20 to 25."""
    kinds = "\n".join(line for line in listed.splitlines() if not line.lower().rstrip().endswith("are..."))
    return tuple(dict.fromkeys(re.findall(r"\b(?:pmix\w*|pmi2|openmpi|cray_shasta)\b", kinds)))


def mpirun() -> tuple[str, str] | None:
    """Return mpirun's path and version text; None if it is not on PATH. Raises UserError."""
    path = shutil.which("mpirun")
    return (path, run_command([path, "--version"])) if path else None


def mpi_version(text: str) -> tuple[str, str] | None:
    """Parse an MPI's family and version from the version text of its mpirun or library; None if unknown."""
    patterns = {
        "Open MPI": r"Open MPI\)? v?(\d[\w.]*)",
        "Intel MPI": r"Intel\(R\) MPI Library(?:.*?Version)? (\d+\.\d+)",
        "MVAPICH": r"MVAPICH\d?.*?Version\s*:\s*(\d[\w.]*)",
        "MPICH": r"(?:MPICH|HYDRA).*?Version\s*:\s*(\d[\w.]*)",
    }
    found = ((family, re.search(pattern, text, re.DOTALL)) for family, pattern in patterns.items())
    return next(((family, match[1]) for family, match in found if match), None)
