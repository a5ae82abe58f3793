"""The checks of one host: turn facts (probes.py) into lines of the report."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from hvd_bert.config.settings import PACKAGE
from hvd_bert.data.cache import default_cache_dir
from hvd_bert.distributed.launch import WITHOUT_HOROVOD
from hvd_bert.machine import free_memory, package_version
from hvd_bert.monitoring.usage import NvmlError
from hvd_bert.storage.reading import GIB
from hvd_bert.tools.doctor import probes
from hvd_bert.tools.doctor.lines import CheckResult, failure, isolated, ok, warning
from hvd_bert.tools.doctor.probes import Gpus, HorovodBuild, NoCluster, ProbeError, Slurm, mpi_version

REQUIREMENTS = PACKAGE.parent / "requirements.txt"
OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 6)
# BERT-base's weights, gradients and AdamW moments in fp32 take 1.6 GiB; a batch and the libraries take the rest.
MEMORY_PER_RANK = 3 * GIB
DISK_RECOMMENDED, DISK_REQUIRED = 3 * GIB, GIB // 10
REBUILD = "Rebuild it with the modules loaded now: env/build_horovod.sh --python $(command -v python) --rebuild."


def host_lines(launcher: str, ranks_here: int, output_dir: Path | None) -> list[CheckResult]:
    """All checks of this host. `output_dir`: where rank 0 would write; None on hosts without rank 0."""
    checks: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "Python": lambda: [python_line(sys.version_info[:3], sys.executable)],
        "torch": lambda: [torch_line(torch.__version__)],
        "Packages": lambda: [packages_line(REQUIREMENTS)],
        "Driver": lambda: [driver_line(probes.gpus())],
        "CUDA": lambda: [cuda_line(torch.version.cuda, torch.cuda.device_count(), probes.gpus(), probes.cuda_hidden())],
        "Horovod": lambda: horovod_lines(probes.horovod()),
        "NCCL": lambda: nccl_lines(probes.horovod(), torch.cuda.device_count(), torch_nccl()),
        "MPI": lambda: [mpi_line(probes.horovod(), probes.mpi4py(), probes.mpirun(), launcher == "srun")],
        "Slurm": lambda: slurm_lines(probes.slurm()),
        "Windows": lambda: [folder_line("Windows", default_cache_dir(), "Set HVD_BERT_CACHE to another folder.")],
        "Memory": lambda: [memory_line(free_memory(), ranks_here)],
    }
    if output_dir is not None:
        checks["Output"] = lambda: [folder_line("Output", output_dir, "Use another --output_dir.")]
    return [result for name, check in checks.items() for result in isolated(name, check)]


def python_line(version: tuple[int, ...], executable: str) -> CheckResult:
    found = f"{'.'.join(map(str, version))}, {executable}"
    if version[:2] < OLDEST_PYTHON:
        return failure("Python", found, "Python 3.10 or later is required: load it, then run env/setup.sh.")
    return ok("Python", found)


def torch_line(version: str) -> CheckResult:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_TORCH:
        return failure("torch", version, "torch 2.6 or later is required: run env/setup.sh --torch VERSION.")
    return ok("torch", f"{version}, {platform.machine()}")


def packages_line(requirements: Path) -> CheckResult:
    """Whether the packages of requirements.txt are installed. Horovod and mpi4py have lines of their own."""
    try:
        names = dict.fromkeys(re.findall(r"^[\w-]+", requirements.read_text(encoding="utf-8"), re.MULTILINE))
    except OSError as error:
        return warning("Packages", f"not checked: {requirements} cannot be read ({error.strerror})")
    missing = [name for name in names if package_version(name) is None and name not in ("horovod", "mpi4py")]
    if not missing:
        return ok("Packages", f"all of {requirements.name} are installed")
    return failure("Packages", f"not installed: {', '.join(missing)}", "Run env/setup.sh.")


def driver_line(gpus: Gpus | NvmlError) -> CheckResult:
    if isinstance(gpus, NvmlError):
        return ok("Driver", f"no NVIDIA driver responds ({gpus}): no GPUs, and no GPU usage is recorded")
    return ok("Driver", f"NVIDIA {gpus.driver}, supports CUDA up to {gpus.cuda}")


def cuda_line(torch_cuda: str | None, visible: int, gpus: Gpus | NvmlError, hidden: bool) -> CheckResult:
    """`visible`: number of GPUs that torch can use. `gpus`: the GPUs that the driver lists."""
    there = gpus.names if isinstance(gpus, Gpus) else ()
    if visible:
        return ok("CUDA", f"torch uses CUDA {torch_cuda}; {visible} GPU(s): {', '.join(there) or 'names unknown'}")
    if not there:
        return ok("CUDA", "no GPU on this host: a training here runs on the CPU")
    found = f"{len(there)} GPU(s) on this host ({there[0]}), "
    if hidden:
        hint = "To use the GPUs, unset CUDA_VISIBLE_DEVICES."
        return warning("CUDA", found + "hidden from this run by CUDA_VISIBLE_DEVICES: it runs on the CPU", hint)
    if torch_cuda is None:
        hint = "To use the GPUs, install a torch for their driver (docs/start/install.md, 'Which torch')."
        return warning("CUDA", found + "but this torch was built for CPUs only and does not use them", hint)
    newest = gpus.cuda if isinstance(gpus, Gpus) else "?"
    return failure(
        "CUDA",
        f"{found}but torch, built for CUDA {torch_cuda}, cannot use them; the driver supports CUDA up to {newest}",
        "Install a torch for the driver's CUDA or older (docs/start/install.md, 'Which torch'), or request GPUs (Slurm:"
        " --gres=gpu:N).",
    )


def horovod_lines(build: HorovodBuild | ProbeError) -> list[CheckResult]:
    if isinstance(build, ProbeError):
        if package_version("horovod") is None:
            return [failure("Horovod", "not installed", f"Run env/setup.sh. {WITHOUT_HOROVOD}")]
        return [failure("Horovod", f"cannot be imported: {build}", f"{REBUILD} {WITHOUT_HOROVOD}")]
    parts = [name for name, there in (("MPI", build.mpi), ("Gloo", build.gloo), ("NCCL", build.nccl)) if there]
    found = f"{build.version}, built with {', '.join(parts) or 'neither MPI nor Gloo'}"
    if build.gloo:
        return [ok("Horovod", found)]
    result = warning if build.mpi else failure
    return [result("Horovod", found + "; without Gloo a single process and `horovodrun --gloo` fail", REBUILD)]


def torch_nccl() -> str:
    """Version of the NCCL that torch includes; "" if it includes none."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""


def nccl_lines(build: HorovodBuild | ProbeError, gpus: int, of_torch: str) -> list[CheckResult]:
    if isinstance(build, ProbeError):
        return []
    if build.nccl:
        return [ok("NCCL", of_torch or "linked into Horovod")]
    if gpus == 0:
        return [ok("NCCL", "not built into Horovod, and not needed without GPUs")]
    found = f"{gpus} GPU(s) are visible, but Horovod was built without NCCL and cannot send data of a GPU"
    hint = "Load CUDA (module load cuda/...), then run env/setup.sh --with-nccl (docs/start/install.md)."
    return [failure("NCCL", found, hint)]


def mpi_line(
    build: HorovodBuild | ProbeError, library: str | ProbeError, mpirun: tuple[str, str] | None, by_srun: bool
) -> CheckResult:
    """Whether mpi4py and mpirun use the same MPI. `library`: mpi4py's version text. `mpirun`: its path and text."""
    if isinstance(build, HorovodBuild) and not build.mpi:
        hint = "" if mpirun is None else "To use MPI, run env/setup.sh --with-mpi."
        return ok("MPI", "Horovod was built without MPI: start it with `horovodrun --gloo`", hint)
    if isinstance(library, ProbeError):
        hint = "Load the MPI module that was loaded at set-up. If this does not help, env/setup.sh reinstalls mpi4py."
        return failure("MPI", f"mpi4py cannot be used: {library}", hint)
    known = mpi_version(library)
    name = " ".join(known) if known else library[:60]
    if mpirun is None:
        hint = "" if by_srun else "Load the MPI module, or start with `horovodrun --gloo` or `srun --mpi=pmix`."
        return (ok if by_srun else warning)("MPI", f"{name}; mpirun is not on PATH", hint)
    path, version = mpirun
    other = mpi_version(version)
    if known and other and known != other:
        return (warning if by_srun else failure)(
            "MPI",
            f"Horovod and mpi4py use {name}, but {path} is {' '.join(other)}: its processes would not find each other",
            "Load the MPI module that Horovod was built with, or run env/setup.sh to build it with this one.",
        )
    return ok("MPI", f"{name}, the same in mpi4py and {path}")


def slurm_lines(slurm: Slurm | ProbeError | None) -> list[CheckResult]:
    if slurm is None or isinstance(slurm, NoCluster):
        reason = f"installed, but not configured ({slurm})" if slurm is not None else "not found (no srun on PATH)"
        return [ok("Slurm", f"{reason}: start with horovodrun or mpirun"), ok("PMIx", "not needed without Slurm")]
    if isinstance(slurm, ProbeError):
        hint = "Ask the cluster's administrators, or start with horovodrun or mpirun."
        return [warning("Slurm", str(slurm), hint)]
    lines = [ok("Slurm", f"{slurm.version}; srun --mpi= supports {', '.join(slurm.mpi_kinds) or 'no MPI'}")]
    if slurm.pmix:
        lines.append(ok("PMIx", f"start with `srun --mpi={slurm.pmix}`"))
    else:
        hint = "Start with mpirun or horovodrun inside the job. With srun, every task would be a world of size 1."
        lines.append(warning("PMIx", "not supported by this Slurm", hint))
    return lines


def folder_line(name: str, folder: Path, hint: str) -> CheckResult:
    """Whether files can be written in `folder`, which need not exist yet, and its free space."""
    try:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return failure(name, f"{folder} cannot be written: {error.strerror or error}", hint)
    found = f"{folder}, {free / GIB:.1f} GiB free"
    if free < DISK_REQUIRED:
        return failure(name, found, hint)
    if free < DISK_RECOMMENDED:
        return warning(name, found, f"{DISK_RECOMMENDED // GIB} GiB or more are recommended. {hint}")
    return ok(name, found)


def memory_line(free: int, ranks_here: int) -> CheckResult:
    found = f"{free / GIB:.1f} GiB free for {ranks_here} rank(s)"
    if free >= MEMORY_PER_RANK * ranks_here:
        return ok("Memory", found)
    hint = "BERT-base needs about 3 GiB per rank, more with large batches: request more (Slurm: --mem) or fewer ranks."
    return warning("Memory", found, hint)
