"""The table of launchers: their variables, how their ranks find each other, and their commands.

To add a launcher, add its row here and a row to tests/unit/test_launch.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# All launchers that set only torch's env:// variables: Kubeflow's PyTorchJob, Volcano, Azure ML, Vertex AI, Run:ai,
# deepspeed and mp.spawn. Users may also set the variables by hand.
BY_TORCH = "torch's variables"
# Who serves a launcher's key-value store: torchrun's agent, rank 0 on the first node of a Slurm step, or rank 0 at
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
    """The ranks to start, and options for the launcher.

    `train`: each rank's command, which begins with the Python interpreter. `ranks`: number of ranks. `hosts`: hosts and
    their slots as HOST:SLOTS,... `allocation`: the surrounding Slurm job. `extra`: more arguments for the launcher.
    `exported`: names of variables to set on all hosts.
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
        variables: Names of its size variable, rank variable and variables that only it sets; one tuple per MPI library.
        store: Server of the ranks' key-value store (AGENT, FIRST_NODE or MASTER); "" if there is none.
        by_mpi: Whether MPI connects Horovod's ranks.
        is_watched: Whether ranks stop when the launcher, their parent process, ends. A killed launcher cannot end them.
        each_status_counts: Whether each rank must exit with the run's status, because nothing waits for all ranks.
        spans_job: Whether it starts ranks on all nodes of the surrounding Slurm job.
        takes_hosts: Whether it accepts a list of hosts (-H).
        command: Function that builds its command line; None if no tool here starts it.
        remedy: How to install the program with the launcher's name; "" if it comes with torch or is not started here.
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
    # --standalone chooses a free port, so that two sweeps on one host do not collide. Without --local-addr, torchrun
    # waits forever on a host whose own name does not resolve.
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*words, f"--nproc-per-node={options.ranks}", *options.extra, *options.train[1:]]


def horovodrun(options: LaunchOptions) -> list[str]:  # horovodrun exports all variables, so `exported` is not used
    words = ["horovodrun", "-np", str(options.ranks), *(["-H", options.hosts] if options.hosts else [])]
    return [*words, *without_cache(), *options.extra, *options.train]


def without_cache() -> list[str]:
    """Return horovodrun's flag to run without its cache of checked hosts, if it cannot write the cache."""
    folder = Path(os.path.expanduser("~/.horovod"))
    return [] if os.access(folder if folder.exists() else folder.parent, os.W_OK) else ["--disable-cache"]


def mpirun(options: LaunchOptions) -> list[str]:
    # Open MPI refuses to start more ranks than slots. By default, a host has one slot per core.
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
    words += ["--export=ALL"] if options.exported else []  # even if sbatch was run with a different --export
    return [*words, *options.extra, *options.train]


# Most specific first: an mpirun inside srun inherits Slurm's variables, but srun does not inherit mpirun's.
LAUNCHERS = {
    # Only torchrun sets TORCHELASTIC_RUN_ID.
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
    """Return a launcher's row; for other names, such as a program's process group, a row of defaults."""
    return LAUNCHERS.get(name, LauncherRow())
