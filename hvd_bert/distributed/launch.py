"""What the launcher and the scheduler say: which world this process is to join, on which device, with which cores.

Decisions only, made from what is handed in (the environment, counts, every rank's place), so that each can be tested
without a cluster. Few other modules of the package name a launcher's variables: `worlds`, the doctor, and DeepSpeed's
strategy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_bert.errors import UserError


class WorldsOfOne(UserError):
    """The launcher's processes do not find each other, and cannot agree on anything."""


@dataclass(frozen=True)
class Launcher:
    """What started this process, by the variables it left; `size` and `rank` are None where nothing did."""

    name: str
    size: int | None
    rank: int | None

    @property
    def speaks_first(self) -> bool:
        """Whether this process is rank 0, or was started alone: until the ranks have met, it prints for all."""
        return self.rank in (None, 0)


TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun's processes have it
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
            continue  # job scripts set these for programs that they start otherwise
        if size in environ and rank in environ:
            return Launcher(name, int(environ[size]), int(environ[rank]))
    return Launcher("none", None, None)


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this is Horovod elastic: horovodrun with --min-np and --host-discovery-script."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def check_size(launcher: Launcher, horovod_size: int) -> None:
    """Raise WorldsOfOne if Horovod sees another world than the launcher made: N worlds of one would train N times."""
    if launcher.size is None or launcher.size == horovod_size:
        return
    if launcher.name == "srun":
        hint = (
            "Start with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm has), or with mpirun or horovodrun."
        )
    else:
        hint = "Use the launcher of the MPI that Horovod was built with, or build it anew with this one (env/setup.sh)."
    raise WorldsOfOne(
        f"{launcher.name} started {launcher.size} processes, but Horovod sees a world of {horovod_size}: they cannot"
        f" find each other, and each would train alone. {hint}"
    )


def check_pmi(launcher: Launcher, environ: Mapping[str, str], mpi: str) -> None:
    """Raise WorldsOfOne if srun gave the tasks no PMI to find each other by: Open MPI would abort each in MPI_Init.

    Others are left to `check_size`: MPICH's kin may speak Slurm's oldest PMI, which leaves no variable.
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
    """Host and port at which the tasks of a Slurm step can meet: its first node, and a port by the job and the step.

    Raises UserError where Slurm's variables do not say. Steps of one job, and of the jobs after it, have other ports.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if first is None:
        raise UserError("Slurm does not say on which nodes this job step runs (SLURM_STEP_NODELIST): start with srun.")
    number = int(environ.get("SLURM_JOB_ID", "0")) * 1009 + int(environ.get("SLURM_STEP_ID", "0"))
    return first[1] + (first[2] or ""), 10_000 + number % 20_000


def choose_device(num_devices: int, local_rank: int, local_size: int) -> str:
    """Device of a rank, "cpu" or "cuda:i", from the number of GPUs that are visible to it.

    A scheduler may show each task its own GPU only, as number 0, whatever the local rank; that two ranks do not
    share one is checked once all of them are known (`check_devices`). Raises UserError if there are too few.
    """
    if num_devices == 0:
        return "cpu"
    if num_devices == 1:
        return "cuda:0"
    if local_rank >= num_devices:
        raise UserError(
            f"{local_size} ranks on this host, but only {num_devices} GPUs are visible: start at most"
            f" {num_devices} ranks per host, or ask for more GPUs (Slurm: --gres=gpu:N)."
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
    """The nodes of a Slurm job, and how many tasks with how many cores it asked for on each."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int | None


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """What the Slurm job around this process, which is no task of a step, may start; None without a job."""
    if "SLURM_JOB_ID" not in environ:
        return None

    def number(*names: str) -> int | None:
        texts = (re.match(r"\d+", environ.get(f"SLURM_{name}", "")) for name in names)
        return next((int(text[0]) for text in texts if text), None)

    nodes = number("JOB_NUM_NODES", "NNODES") or 1
    # TASKS_PER_NODE may be "2(x3)" or "2,1": the first node's counts.
    return Allocation(nodes, number("NTASKS_PER_NODE", "TASKS_PER_NODE") or 1, number("CPUS_PER_TASK"))


def share_cores(mine: frozenset[int], on_this_host: Sequence[frozenset[int]]) -> int:
    """Threads for a rank that may use the cores `mine`, which it shares with every rank whose set overlaps."""
    sharers = sum(1 for cores in on_this_host if cores & mine)
    return max(1, len(mine) // max(1, sharers))


def choose_threads(environ: Mapping[str, str], share: int) -> int:
    """Threads of a rank: what the user said, else its `share` of the cores, within Slurm's --cpus-per-task."""
    said = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if said.isdecimal() and int(said) > 0:
        return int(said)
    allotted = environ.get("SLURM_CPUS_PER_TASK", "")
    return min(share, int(allotted)) if allotted.isdecimal() and int(allotted) > 0 else share


@dataclass(frozen=True)
class RankInfo:
    """Where one rank sits. `device_id`: the GPU's UUID, the same for every process that uses it; None on a CPU."""

    rank: int
    host: str
    local_rank: int
    device: str
    device_id: str | None
    cores: frozenset[int]


def check_devices(rank_infos: Sequence[RankInfo]) -> None:
    """Raise UserError if two ranks were given the same GPU, or only some of them have one."""
    if len({info.device == "cpu" for info in rank_infos}) > 1:
        without = dict.fromkeys(info.host for info in rank_infos if info.device == "cpu")
        raise UserError(
            f"Some ranks have a GPU, others on {', '.join(without)} have none: look there with `nvidia-smi`, leave that"
            " host out, or ask for a GPU per rank."
        )
    taken = Counter((info.host, info.device_id) for info in rank_infos if info.device_id is not None)
    for (host, device_id), times in taken.items():
        if times > 1:
            raise UserError(
                f"{times} ranks on {host} would share one GPU ({device_id}): start one rank per GPU, or ask for more"
                " GPUs (Slurm: --gres=gpu:N, with --gpus-per-task=1 or all of them visible to each task)."
            )
