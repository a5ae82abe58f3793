"""Check this host: turn the facts of probes.py into results."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from hvd_bert.config.settings import PACKAGE
from hvd_bert.data.cache import default_cache_dir
from hvd_bert.distributed.launch import WITHOUT_HOROVOD
from hvd_bert.errors import UserError
from hvd_bert.machine import free_memory, package_version
from hvd_bert.storage.reading import GIB
from hvd_bert.storage.writing import check_folder, first_existing
from hvd_bert.tools.doctor import probes
from hvd_bert.tools.doctor.lines import CheckResult, failure, isolated, ok, warning
from hvd_bert.tools.doctor.probes import Gpus, HorovodBuild, Slurm, mpi_version
from hvd_bert.tools.runs.failure import OTHER_TMPDIR

REQUIREMENTS = PACKAGE.parent / "requirements.txt"
OLDEST_PYTHON, OLDEST_TORCH = (3, 10), (2, 6)
# BERT-base's weights, gradients and AdamW moments in fp32 take 1.6 GiB; a batch and the libraries need more.
MEMORY_PER_RANK = 3 * GIB
DISK_RECOMMENDED, DISK_REQUIRED = 3 * GIB, GIB // 10
REBUILD = "Rebuild it with the modules loaded now: env/build_horovod.sh --python $(command -v python) --rebuild."


def host_lines(launcher: str, ranks_here: int, output_dir: Path | None) -> list[CheckResult]:
    """Run all checks of this host. `ranks_here`: number of ranks on it.

    `output_dir`: the folder to check; None on hosts without rank 0, which write no output.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    checks: dict[str, Callable[[], Iterable[CheckResult]]] = {
        "Python": lambda: [python_line(sys.version_info[:3], sys.executable)],
        "torch": lambda: [torch_line(torch.__version__)],
        "Packages": lambda: [packages_line(REQUIREMENTS)],
        "Driver": lambda: [driver_line(probes.gpus())],
        "CUDA": lambda: [cuda_line(torch.version.cuda, torch.cuda.device_count(), probes.gpus(), hidden)],
        "Horovod": lambda: [horovod_line(probes.horovod())],
        "NCCL": lambda: nccl_lines(probes.horovod(), torch.cuda.device_count(), torch_nccl()),
        "MPI": lambda: [mpi_line(probes.horovod(), launcher == "srun")],
        "Slurm": lambda: slurm_lines(probes.slurm()),
        "Windows": lambda: [folder_line("Windows", default_cache_dir(), "Set HVD_BERT_CACHE to another folder.")],
        "TMPDIR": lambda: [folder_line("TMPDIR", temporary_folder(), OTHER_TMPDIR, DISK_REQUIRED)],
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
    """Check that the packages of requirements.txt are installed. Horovod and mpi4py have checks of their own."""
    try:
        names = dict.fromkeys(re.findall(r"^[\w-]+", requirements.read_text(encoding="utf-8"), re.MULTILINE))
    except OSError as error:
        return warning("Packages", f"not checked: {requirements} cannot be read ({error.strerror})")
    missing = [name for name in names if package_version(name) is None and name not in ("horovod", "mpi4py")]
    if not missing:
        return ok("Packages", f"all of {requirements.name} are installed")
    return failure("Packages", f"not installed: {', '.join(missing)}", "Run env/setup.sh.")


def driver_line(gpus: Gpus) -> CheckResult:
    if gpus.error:
        return ok("Driver", f"no NVIDIA driver responds ({gpus.error}): no GPUs, and no GPU usage is recorded")
    return ok("Driver", f"NVIDIA {gpus.driver}, supports CUDA up to {gpus.cuda}")


def cuda_line(torch_cuda: str | None, visible: int, gpus: Gpus, hidden: bool) -> CheckResult:
    """Compare the GPUs that torch can use with the GPUs that the driver lists.

    `visible`: number of GPUs that torch can use. `hidden`: whether CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    if visible:
        return ok("CUDA", f"torch uses CUDA {torch_cuda}; {visible} GPU(s): {', '.join(gpus.names) or 'names unknown'}")
    if not gpus.names:
        return ok("CUDA", "no GPU on this host: a training here runs on the CPU")
    found = f"{len(gpus.names)} GPU(s) on this host ({gpus.names[0]}), "
    if hidden:
        found += "hidden from this run by CUDA_VISIBLE_DEVICES: it runs on the CPU"
        return warning("CUDA", found, "To use the GPUs, unset CUDA_VISIBLE_DEVICES.")
    if torch_cuda is None:
        hint = "To use the GPUs, install a torch for their driver (docs/start/install.md, 'Which torch')."
        return warning("CUDA", found + "but this torch was built for CPUs only and does not use them", hint)
    found += f"but torch, built for CUDA {torch_cuda}, cannot use them; the driver supports CUDA up to {gpus.cuda}"
    hint = "Install a torch for the driver's CUDA or older (docs/start/install.md, 'Which torch'), or request GPUs"
    return failure("CUDA", found, f"{hint} (Slurm: --gres=gpu:N).")


def horovod_line(build: HorovodBuild) -> CheckResult:
    if build.error and package_version("horovod") is None:
        return warning("Horovod", "not installed", f"Run `bash env/setup.sh` to train with it. {WITHOUT_HOROVOD}")
    if build.error:
        return failure("Horovod", f"cannot be imported: {build.error}", f"{REBUILD} {WITHOUT_HOROVOD}")
    parts = [name for name, there in (("MPI", build.mpi), ("Gloo", build.gloo), ("NCCL", build.nccl)) if there]
    found = f"{build.version}, built with {', '.join(parts) or 'neither MPI nor Gloo'}"
    if build.gloo:
        return ok("Horovod", found)
    result = warning if build.mpi else failure
    return result("Horovod", found + "; without Gloo a single process and `horovodrun --gloo` fail", REBUILD)


def torch_nccl() -> str:
    """Return the version of torch's NCCL; "" if torch was built without CUDA."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""


def nccl_lines(build: HorovodBuild, gpus: int, of_torch: str) -> list[CheckResult]:
    if build.error:
        return []
    if build.nccl:
        return [ok("NCCL", of_torch or "linked into Horovod")]
    if gpus == 0:
        return [ok("NCCL", "not built into Horovod, and not needed without GPUs")]
    found = f"{gpus} GPU(s) are visible, but Horovod was built without NCCL and cannot send data of a GPU"
    hint = "Load CUDA (module load cuda/...), then run env/setup.sh --with-nccl (docs/start/install.md)."
    return [failure("NCCL", found, hint)]


def mpi_line(build: HorovodBuild, by_srun: bool) -> CheckResult:
    """Check that mpi4py and mpirun use the same MPI. `by_srun`: whether srun, not mpirun, starts the ranks."""
    if not build.error and not build.mpi:
        hint = "To use MPI, run env/setup.sh --with-mpi." if probes.mpirun() else ""
        return ok("MPI", "Horovod was built without MPI: start it with `horovodrun --gloo`", hint)
    try:
        library = probes.mpi4py()
    except UserError as error:
        hint = "Load the MPI module that was loaded at set-up. If this does not help, env/setup.sh reinstalls mpi4py."
        return failure("MPI", f"mpi4py cannot be used: {error}", hint)
    known = mpi_version(library)
    name = " ".join(known) if known else library[:60]
    path, version = probes.mpirun() or ("", "")
    if not path:
        hint = "" if by_srun else "Load the MPI module, or start with `horovodrun --gloo` or `srun --mpi=pmix`."
        return (ok if by_srun else warning)("MPI", f"{name}; mpirun is not on PATH", hint)
    other = mpi_version(version)
    if known and other and known != other:
        found = f"Horovod and mpi4py use {name}, but {path} is {' '.join(other)}"
        hint = "Load the MPI module that Horovod was built with, or run env/setup.sh to build it with this one."
        return (warning if by_srun else failure)("MPI", f"{found}: its processes would not find each other", hint)
    return ok("MPI", f"{name}, the same in mpi4py and {path}")


def slurm_lines(slurm: Slurm) -> list[CheckResult]:
    if slurm.absent:
        return [ok("Slurm", f"{slurm.absent}: start with horovodrun or mpirun"), ok("PMIx", "not needed without Slurm")]
    if slurm.error:
        return [warning("Slurm", slurm.error, "Ask the cluster's administrators, or start with horovodrun or mpirun.")]
    known = ok("Slurm", f"{slurm.version}; srun --mpi= supports {', '.join(slurm.mpi_kinds) or 'no MPI'}")
    if slurm.pmix:
        return [known, ok("PMIx", f"start with `srun --mpi={slurm.pmix}`")]
    hint = "Start with mpirun or horovodrun inside the job, or with `srun --mpi=none` and --strategy ddp or fsdp."
    return [known, warning("PMIx", "not supported by this Slurm", hint)]


def temporary_folder() -> Path:
    """Return the folder for temporary files, chosen as Open MPI and PMIx do."""
    return Path(next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp"))


def folder_line(name: str, folder: Path, hint: str, recommended: int = DISK_RECOMMENDED) -> CheckResult:
    """Check that files can be written to a folder, which need not exist yet, and that enough disk space is free."""
    try:
        check_folder(folder)
        free = shutil.disk_usage(first_existing(folder)).free
    except OSError as error:
        return failure(name, f"{folder} cannot be written: {error.strerror or error}", hint)
    found = f"{folder}, {free / GIB:.1f} GiB free"
    if free < DISK_REQUIRED:
        return failure(name, found, hint)
    if free < recommended:
        return warning(name, found, f"{recommended // GIB} GiB or more are recommended. {hint}")
    return ok(name, found)


def memory_line(free: int, ranks_here: int) -> CheckResult:
    found = f"{free / GIB:.1f} GiB free for {ranks_here} rank(s)"
    if free >= MEMORY_PER_RANK * ranks_here:
        return ok("Memory", found)
    hint = "BERT-base needs about 3 GiB per rank, more with large batches: request more (Slurm: --mem) or fewer ranks."
    return warning("Memory", found, hint)
