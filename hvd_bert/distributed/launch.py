"""World, device and cores of a process, from the variables of the launcher and the scheduler.

These functions only decide, from their arguments (environment, counts, rank infos), so that tests need no cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_bert.errors import UserError


class WorldsOfOne(UserError):
    """The launcher's processes cannot find each other: each would be a world of one."""


@dataclass(frozen=True)
class Launcher:
    """The program that started this process, by its variables. `size` and `rank` are None without one."""

    name: str
    size: int | None
    rank: int | None

    @property
    def speaks_first(self) -> bool:
        """Whether this process prints for all until they have joined: rank 0, or a process without a launcher."""
        return self.rank in (None, 0)


TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun sets it
# Most specific first: mpirun inside srun inherits Slurm's variables, never the other way round.
_LAUNCHERS = (
    ("torchrun", "WORLD_SIZE", "RANK"),
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher of this process, from its environment."""
    for name, size, rank in _LAUNCHERS:
        if name == "torchrun" and TORCHRUN not in environ:
            continue  # job scripts may set these variables for other launchers
        if size in environ and rank in environ:
            return Launcher(name, int(environ[size]), int(environ[rank]))
    return Launcher("none", None, None)


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this is Horovod elastic: horovodrun with --min-np and --host-discovery-script."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process."""
    return "SLURM_STEP_ID" in environ


def check_size(launcher: Launcher, horovod_size: int) -> None:
    """Raise WorldsOfOne if Horovod's world size is not the launcher's: N worlds of one would train N times."""
    if launcher.size is None or launcher.size == horovod_size:
        return
    if launcher.name == "srun":
        hint = (
            "Start with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm has), or with mpirun or horovodrun."
        )
    else:
        hint = "Use the launcher of the MPI that Horovod was built with, or rebuild it with this one (env/setup.sh)."
    raise WorldsOfOne(
        f"{launcher.name} started {launcher.size} processes, but Horovod sees a world of {horovod_size}: they cannot"
        f" find each other, and each would train alone. {hint}"
    )


def check_pmi(launcher: Launcher, environ: Mapping[str, str], mpi: str) -> None:
    """Raise WorldsOfOne if srun started the tasks without PMI: Open MPI would abort each in MPI_Init.

    Other MPIs are left to `check_size`: those based on MPICH may use Slurm's oldest PMI, which sets no variable.
    """
    if launcher.name != "srun" or launcher.size == 1 or not mpi.startswith("Open MPI"):
        return
    if not any(name.startswith(("PMIX_", "PMI_", "PMI2_")) for name in environ):
        raise WorldsOfOne(
            f"srun started {launcher.size} processes without PMIx: they cannot find each other, and each would be a"
            " world of one. Start with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm has), or with mpirun"
            " or horovodrun."
        )


def slurm_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Rendezvous host and port for the tasks of a Slurm step: its first node, and a port by job and step.

    Other steps and jobs get other ports. Raises UserError if Slurm's variables are missing.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if first is None:
        raise UserError("The nodes of this job step are unknown (SLURM_STEP_NODELIST is not set). Start with srun.")
    number = int(environ.get("SLURM_JOB_ID", "0")) * 1009 + int(environ.get("SLURM_STEP_ID", "0"))
    return first[1] + (first[2] or ""), 10_000 + number % 20_000


def choose_device(num_devices: int, local_rank: int, local_size: int) -> str:
    """Device of a rank, "cpu" or "cuda:i", from the number of visible GPUs. Raises UserError if there are too few.

    A scheduler may show each task only its own GPU, as number 0. `check_devices` checks that no two ranks share one.
    """
    if num_devices == 0:
        return "cpu"
    if num_devices == 1:
        return "cuda:0"
    if local_rank >= num_devices:
        raise UserError(
            f"{local_size} ranks on this host, but only {num_devices} GPUs are visible. Start at most"
            f" {num_devices} ranks per host, or request more GPUs (Slurm: --gres=gpu:N)."
        )
    return f"cuda:{local_rank}"


def find_job(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The Slurm job around this process: its `id`, `name`, `partition`, `nodes` (Slurm's list), `array`; or None."""
    variables = {"id": "JOB_ID", "name": "JOB_NAME", "partition": "JOB_PARTITION", "nodes": "JOB_NODELIST"}
    job = {key: environ[f"SLURM_{name}"] for key, name in variables.items() if f"SLURM_{name}" in environ}
    if "SLURM_ARRAY_JOB_ID" in environ:
        job["array"] = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    return job if "id" in job else None


@dataclass(frozen=True)
class Allocation:
    """A Slurm job's nodes, tasks per node and cores per task."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation of the Slurm job around this process, outside of its steps; None without a job."""
    if "SLURM_JOB_ID" not in environ:
        return None

    def number(*names: str) -> int | None:
        texts = (re.match(r"\d+", environ.get(f"SLURM_{name}", "")) for name in names)
        return next((int(text[0]) for text in texts if text), None)

    nodes = number("JOB_NUM_NODES", "NNODES") or 1
    # TASKS_PER_NODE may be "2(x3)" or "2,1": take the first node's number.
    return Allocation(nodes, number("NTASKS_PER_NODE", "TASKS_PER_NODE") or 1, number("CPUS_PER_TASK"))


def share_cores(mine: frozenset[int], on_this_host: Sequence[frozenset[int]]) -> int:
    """Threads for a rank that may use the cores `mine`, which it shares with every rank whose set overlaps."""
    sharers = sum(1 for cores in on_this_host if cores & mine)
    return max(1, len(mine) // max(1, sharers))


def choose_threads(environ: Mapping[str, str], share: int) -> int:
    """Threads per rank: OMP_NUM_THREADS, else its `share` of the cores, at most Slurm's --cpus-per-task."""
    chosen = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    allotted = environ.get("SLURM_CPUS_PER_TASK", "")
    return min(share, int(allotted)) if allotted.isdecimal() and int(allotted) > 0 else share


@dataclass(frozen=True)
class RankInfo:
    """Host, device and cores of a rank. `device_id`: the GPU's UUID, equal in all processes; None on a CPU."""

    rank: int
    host: str
    local_rank: int
    device: str
    device_id: str | None
    cores: frozenset[int]


def check_devices(rank_infos: Sequence[RankInfo]) -> None:
    """Raise UserError if two ranks share a GPU, or only some ranks have one."""
    if len({info.device == "cpu" for info in rank_infos}) > 1:
        without = dict.fromkeys(info.host for info in rank_infos if info.device == "cpu")
        raise UserError(
            f"Some ranks have a GPU, but those on {', '.join(without)} have none. Run `nvidia-smi` there, leave that"
            " host out, or request a GPU per rank."
        )
    taken = Counter((info.host, info.device_id) for info in rank_infos if info.device_id is not None)
    for (host, device_id), times in taken.items():
        if times > 1:
            raise UserError(
                f"{times} ranks on {host} would share one GPU ({device_id}). Start one rank per GPU, or request more"
                " GPUs (Slurm: --gres=gpu:N, with --gpus-per-task=1 or all of them visible to each task)."
            )
