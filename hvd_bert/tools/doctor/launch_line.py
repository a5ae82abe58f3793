"""Build the commands that start a training, which the doctor prints if the checks pass."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hvd_bert.config.settings import PACKAGE
from hvd_bert.distributed import launchers
from hvd_bert.distributed.slurm import find_job, requested_tasks
from hvd_bert.machine import cpu_limit, free_memory
from hvd_bert.tools.doctor import probes
from hvd_bert.tools.doctor.checks import MEMORY_PER_RANK


def on_this_host() -> dict[str, str]:
    """Build the commands that start a training: in one process, with a rank per GPU or core, and in a Slurm job.

    Returns description -> command, without commands that cannot work here.
    """
    gpus, build, slurm = torch.cuda.device_count(), probes.horovod(), probes.slurm()
    flags, of = ([], "") if gpus else (["--config", "sample"], ", on sample data")  # small enough for a CPU
    train = shlex.join([_program("python"), "-m", "hvd_bert.train", *flags])
    found = {f"1 process{of}": train} if requested_tasks(os.environ) == 1 else {}
    cores = min(len(os.sched_getaffinity(0)), int(cpu_limit() or sys.maxsize))
    ranks = gpus or min(cores, free_memory() // MEMORY_PER_RANK)
    by_mpi = build.mpi and shutil.which("mpirun") is not None
    if ranks > 1 and (by_mpi or build.gloo):
        gloo = ["--gloo"] if build.mpi and not by_mpi else []
        one_per = "GPU" if gpus else "core"
        found[f"{ranks} ranks, one per {one_per}{of}"] = horovodrun({"localhost": ranks}, gloo, flags)
    script = "scripts/hvd.slurm"
    if slurm.pmix and build.mpi:
        if find_job(os.environ):
            found["The tasks of this Slurm job"] = f"srun --mpi={slurm.pmix} {train}"
        elif (PACKAGE.parent / script).exists():
            clone = shlex.quote(str(PACKAGE.parent))  # the script looks for .venv in the current folder
            found["A Slurm job, once the script's first lines fit the site"] = f"cd {clone} && sbatch {script}"
    return found


def horovodrun(slots: Mapping[str, int], options: Sequence[str] = (), flags: Sequence[str] = ()) -> str:
    """Build the horovodrun line that starts a rank per slot, with horovodrun's `options` and the trainer's `flags`."""
    hosts = ",".join(f"{host}:{number}" for host, number in slots.items())
    train = [_program("python"), "-m", "hvd_bert.train", *flags]
    program, *words = launchers.horovodrun(launchers.LaunchOptions(train, sum(slots.values()), hosts, extra=options))
    return shlex.join([_program(program), *words])


def _program(name: str) -> str:
    """Return a program's name if this Python environment is active, else its path in the environment."""
    environment = Path(sys.executable).parent
    active = Path(shutil.which("python") or "").parent == environment
    return name if active else str(environment / name)
