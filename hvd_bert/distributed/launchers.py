"""The table of launchers: their variables, how their ranks meet, and their commands.

To add a launcher, add its row here and a row to tests/unit/test_launch.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# torch's env:// rendezvous: Kubeflow's PyTorchJob, Volcano, Azure ML, Vertex AI, Run:ai, deepspeed, mp.spawn, by hand.
BY_TORCH = "torch's variables"
# The server of a launcher's key-value store: torchrun's agent, rank 0 on the first node of a Slurm step, or rank 0 at
# MASTER_ADDR and MASTER_PORT.
AGENT, FIRST_NODE, MASTER = "agent", "first node", "master"


@dataclass(frozen=True)
class Allocation:
    """A Slurm job's nodes, tasks per node and cores per task."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None


@dataclass(frozen=True)
class LaunchOptions:
    """Number and command of the ranks to start, and options for the launcher.

    `train`: the command of each rank, which begins with Python. `hosts`: HOST:SLOTS,... `extra`: the launcher's
    arguments. `exported`: names of variables for all hosts.
    """

    train: Sequence[str]
    ranks: int
    hosts: str | None = None
    allocation: Allocation | None = None
    extra: Sequence[str] = ()
    exported: Sequence[str] = ()


@dataclass(frozen=True)
class LauncherRow:
    """Facts about a launcher.

    Attributes:
        variables: Names of the variables of size and rank, and of others that only it sets; one tuple per MPI.
        store: Server of the key-value store in which the ranks meet; "" for none.
        by_mpi: Whether MPI connects Horovod's ranks.
        is_watched: Whether ranks stop once the launcher, their parent process, has ended. A killed one leaves them.
        each_status_counts: Whether nothing waits for all ranks, so that each must end with the status of the run.
        spans_job: Whether it starts ranks on all nodes of the surrounding Slurm job.
        takes_hosts: Whether it takes a list of hosts (-H).
        command: Builds its command; None if no tool starts it.
        remedy: How to install its program, of the same name; "" if it comes with torch.
    """

    variables: tuple[tuple[str, ...], ...] = ()
    store: str = ""
    by_mpi: bool = False
    is_watched: bool = False
    each_status_counts: bool = False
    spans_job: bool = False
    takes_hosts: bool = False
    command: Callable[[LaunchOptions], list[str]] | None = None
    remedy: str = ""


def torchrun(options: LaunchOptions) -> list[str]:
    # --standalone takes a free port, so that two sweeps on one host do not collide. Without the address torchrun waits
    # forever on a host whose own name does not resolve.
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*words, f"--nproc-per-node={options.ranks}", *options.extra, *options.train[1:]]


def horovodrun(options: LaunchOptions) -> list[str]:  # exports all variables
    words = ["horovodrun", "-np", str(options.ranks), *(["-H", options.hosts] if options.hosts else [])]
    return [*words, *without_cache(), *options.extra, *options.train]


def without_cache() -> list[str]:
    """The flag that horovodrun needs where it cannot write its cache of checked hosts."""
    folder = Path(os.path.expanduser("~/.horovod"))
    return [] if os.access(folder if folder.exists() else folder.parent, os.W_OK) else ["--disable-cache"]


def mpirun(options: LaunchOptions) -> list[str]:
    # Open MPI refuses more ranks than slots, which are this host's cores by default. Ranks are not bound to cores.
    hosts = options.hosts or ("" if options.allocation else f"localhost:{options.ranks}")
    words = ["mpirun", "-np", str(options.ranks), *(["-H", hosts] if hosts else []), "--bind-to", "none"]
    return [*words, *(word for name in options.exported for word in ("-x", name)), *options.extra, *options.train]


def srun(options: LaunchOptions) -> list[str]:
    job = options.allocation
    assert job is not None
    per_node = min(options.ranks, job.tasks_per_node)
    words = ["srun", "--mpi=pmix", "--kill-on-bad-exit=1", "--wait=60", f"--nodes={-(-options.ranks // per_node)}"]
    words += [f"--ntasks={options.ranks}", f"--ntasks-per-node={per_node}"]
    # Since Slurm 22.05 srun does not inherit the job's --cpus-per-task.
    words += [f"--cpus-per-task={job.cpus_per_task}"] if job.cpus_per_task else []
    words += ["--export=ALL"] if options.exported else []  # even if sbatch was given another --export
    return [*words, *options.extra, *options.train]


# Most specific first: mpirun inside srun inherits Slurm's variables, never the other way round.
LAUNCHERS = {
    # Only torchrun sets the last variable.
    "torchrun": LauncherRow(
        (("WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"),), store=AGENT, is_watched=True, command=torchrun
    ),
    "horovodrun": LauncherRow(
        (("HOROVOD_SIZE", "HOROVOD_RANK"),),
        is_watched=True,
        takes_hosts=True,
        command=horovodrun,
        remedy="run `bash env/setup.sh`",
    ),
    "mpirun": LauncherRow(
        (
            ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
            ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
            ("MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"),
            ("PMI_SIZE", "PMI_RANK"),
        ),
        by_mpi=True,
        is_watched=True,
        spans_job=True,
        takes_hosts=True,
        command=mpirun,
        remedy="run `module load openmpi` or `apt-get install openmpi-bin libopenmpi-dev`, then `bash env/setup.sh`",
    ),
    "jsrun": LauncherRow((("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),), by_mpi=True),
    "flux": LauncherRow((("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),), by_mpi=True),
    "srun": LauncherRow(
        (("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),),
        store=FIRST_NODE,
        by_mpi=True,
        spans_job=True,
        command=srun,
        remedy="add the folder of Slurm's commands to PATH",
    ),
    BY_TORCH: LauncherRow((("WORLD_SIZE", "RANK"),), store=MASTER, each_status_counts=True),
}


def launcher_row(name: str) -> LauncherRow:
    """The row of a launcher; an empty one for other names, such as a program's process group."""
    return LAUNCHERS.get(name, LauncherRow())
