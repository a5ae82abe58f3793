"""The world of a process, and the Slurm job around it, from the variables of the launcher and the scheduler.

These functions only read their arguments, so that tests need no cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field

import psutil

from hvd_bert.errors import UserError


class LaunchError(UserError):
    """A mistake in how the job was started, which all of its processes find. Rank 0 reports it."""


class VariableError(LaunchError):
    """A variable is wrong, perhaps on some hosts only: the first rank of each host reports it."""


class WorldsOfOne(LaunchError):
    """The launcher's processes cannot find each other: each would be a world of one."""


@dataclass(frozen=True)
class Launcher:
    """The program that started this process, by its variables. `size` and `rank` are None without one.

    `local_rank`: the rank among those of this host; None if the launcher does not tell.
    """

    name: str
    size: int | None
    rank: int | None
    local_rank: int | None = field(default=None, compare=False)

    @property
    def speaks_first(self) -> bool:
        """Whether this process prints for all until they have joined: rank 0, or a process without a launcher."""
        return self.rank in (None, 0)

    def reports(self, error: LaunchError) -> bool:
        """Whether this process reports a mistake although another one speaks first: that one may not have it."""
        return isinstance(error, VariableError) and self.local_rank == 0


TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun sets it
# Each launcher's variables: size and rank in the world, rank on this host, then size and rank in parts of the world.
# Most specific first: mpirun inside srun inherits Slurm's variables, never the other way round.
_LAUNCHERS: tuple[tuple[str, str, str, str, list[tuple[str, str]]], ...] = (
    (
        *("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
        [("LOCAL_WORLD_SIZE", "LOCAL_RANK"), ("GROUP_WORLD_SIZE", "GROUP_RANK")],
    ),
    (
        *("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
        [("HOROVOD_LOCAL_SIZE", "HOROVOD_LOCAL_RANK"), ("HOROVOD_CROSS_SIZE", "HOROVOD_CROSS_RANK")],
    ),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", []),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", []),
    ("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", []),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", []),
)
_HOROVOD_VALUES = {"HOROVOD_CONTROLLER": ("mpi", "gloo"), "HOROVOD_CPU_OPERATIONS": ("mpi", "gloo", "ccl")}
GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
# Horovod reads a text as 0, and -1 as a huge number, with which it aborts or never sends anything.
_HOROVOD_NUMBERS = {
    GLOO_TIMEOUT: (1, 2**32 - 1),
    "HOROVOD_CACHE_CAPACITY": (0, 2**31 - 1),
    "HOROVOD_FUSION_THRESHOLD": (0, 2**32 - 1),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": (0, 2**31 - 1),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": (0, 2**31 - 1),
    "HOROVOD_STALL_CHECK_DISABLE": (0, 1),
    "HOROVOD_HIERARCHICAL_ALLREDUCE": (0, 1),
    "HOROVOD_HIERARCHICAL_ALLGATHER": (0, 1),
    "HOROVOD_AUTOTUNE": (0, 1),
}
MAX_CYCLE_MS = 10_000
PTY = "SLURM_PTY_PORT"  # of `srun --pty bash`: only its first task has a terminal
WITH_PMIX = "Start with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm has), or with mpirun or horovodrun."
WITHOUT_HOROVOD = (
    "Without Horovod: --strategy ddp under torchrun or srun, or --strategy none in one process (docs/start/install.md)."
)
IN_SWEEP = "HVD_BERT_IN_SWEEP"
GLOO_TIMEOUT_S = 30  # Horovod's default
GLOO_S_PER_RANK = 4


def number(environ: Mapping[str, str], name: str, minimum: int = 0, maximum: int = 2**32 - 1) -> int | None:
    """A variable that holds a whole number; None if it is not set. Raises LaunchError if it holds anything else."""
    text = environ.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,10}", text) is None or not minimum <= int(text) <= maximum:
        raise VariableError(
            f"{name}={text[:40]!r}: must be a whole number from {minimum} to {maximum}. Unset it, or start with the"
            " launcher that sets it."
        )
    return int(text)


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher of this process, from its environment. Raises LaunchError if its variables cannot be true."""
    for name, size, rank, local_rank, parts in _LAUNCHERS:
        if name == "torchrun":
            if TORCHRUN not in environ:
                continue  # job scripts may set these variables for other launchers
            _check_torchrun(environ, size, rank, *(variable for part in parts for variable in part))
        if size in environ and rank in environ:
            for part in parts:
                _size_and_rank(environ, name, *part)
            return Launcher(name, *_size_and_rank(environ, name, size, rank), number(environ, local_rank))
    return Launcher("none", None, None)


def speaks_first(environ: Mapping[str, str]) -> bool:
    """Whether this process reports what all processes find before they have joined."""
    try:
        launcher = find_launcher(environ)
        return launcher.speaks_first and (environ.get("SLURM_PROCID") == "0" or not is_nested(launcher, environ))
    except LaunchError:
        return True  # its rank is unknown


def ancestors() -> set[str]:
    """The names of the programs that started this process on this host, where it may see them."""
    try:
        return {process.name() for process in psutil.Process().parents()}
    except psutil.Error:
        return set()


def is_nested(
    launcher: Launcher, environ: Mapping[str, str], programs: Callable[[], Collection[str]] = ancestors
) -> bool:
    """Whether each of several tasks of srun has started an mpirun or horovodrun of its own."""
    if (number(environ, "SLURM_STEP_NUM_TASKS", 1) or 1) == 1 or PTY in environ:
        return False
    if launcher.name == "horovodrun":
        return True
    # mpirun starts daemons on other nodes through an srun of its own: their ranks have the variables of that step.
    return launcher.name == "mpirun" and not {"mpirun", "mpiexec", "orterun", "prterun"}.isdisjoint(programs())


def check_nesting(launcher: Launcher, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if each of srun's tasks would start the whole job."""
    if is_nested(launcher, environ):
        tasks = environ["SLURM_STEP_NUM_TASKS"]
        raise LaunchError(
            f"Each of srun's {tasks} tasks has started {launcher.name} with {launcher.size} ranks. Use one launcher:"
            f" `srun --mpi=pmix python ...`, or {launcher.name} without srun."
        )


def _size_and_rank(environ: Mapping[str, str], launcher: str, *names: str) -> tuple[int | None, int | None]:
    size, rank = (number(environ, name, minimum) for name, minimum in zip(names, (1, 0), strict=True))
    if size is not None and rank is not None and rank >= size:
        raise VariableError(
            f"{names[1]}={rank}, but {names[0]}={size}: ranks are counted from 0. {launcher} sets both: unset them, or"
            f" start with {launcher}."
        )
    return size, rank


def _check_torchrun(environ: Mapping[str, str], *numbers: str) -> None:
    for name in (*numbers, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        if name not in environ:
            raise VariableError(
                f"{TORCHRUN} is set, but {name} is not. torchrun sets both: start with torchrun, or unset {TORCHRUN}."
            )
    number(environ, "MASTER_PORT", 1, 65535)


def check_horovod(launcher: Launcher, environ: Mapping[str, str]) -> None:
    """Raise LaunchError for variables with which Horovod would abort, hang or do something else, without a message."""
    for name, limits in _HOROVOD_NUMBERS.items():
        number(environ, name, *limits)
    cycle = environ.get("HOROVOD_CYCLE_TIME", "1")
    if re.fullmatch(r"[0-9]+\.?[0-9]*", cycle) is None or float(cycle) > MAX_CYCLE_MS:
        raise VariableError(
            f"HOROVOD_CYCLE_TIME={cycle[:40]!r}: must be a number of ms up to {MAX_CYCLE_MS}. Or unset it."
        )
    for name, values in _HOROVOD_VALUES.items():
        if environ.get(name, "gloo").lower() not in values:
            raise VariableError(f"{name}={environ[name][:40]!r}: must be {' or '.join(values)}. Or unset it.")
    by_gloo = environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo"
    if launcher.name == "horovodrun" and by_gloo and launcher.size != 1 and horovodrun_address(environ) is None:
        raise VariableError(
            f"HOROVOD_SIZE={launcher.size}, but HOROVOD_GLOO_RENDEZVOUS_ADDR or _PORT is not set. horovodrun sets all:"
            " unset HOROVOD_SIZE and HOROVOD_RANK, or start with horovodrun."
        )


def horovodrun_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where horovodrun serves the addresses of its ranks over Gloo; None if it does not."""
    host, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT", 1, 65535)
    return (host, port) if host and port else None


def gloo_timeout_s(environ: Mapping[str, str]) -> int:
    """Seconds in which ranks that have started must find each other over Gloo. Horovod reads the same variable."""
    return number(environ, GLOO_TIMEOUT, 1) or GLOO_TIMEOUT_S


def extend_gloo_timeout(launcher: Launcher, environ: MutableMapping[str, str]) -> None:
    """Give the ranks of a large world longer to find each other over Gloo. Keeps what the user has set.

    Each asks the launcher, one Python process, for the addresses of all others, so the time grows with the square of
    the world size (docs/evidence/many-ranks.md). Not under Horovod elastic, where a lost host is noticed by it.
    """
    needed = GLOO_S_PER_RANK * (launcher.size or 1)
    if needed > GLOO_TIMEOUT_S and not is_elastic(environ):
        environ.setdefault(GLOO_TIMEOUT, str(needed))


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this is Horovod elastic: horovodrun with --min-np and --host-discovery-script."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def check_size(launcher: Launcher, horovod_size: int) -> None:
    """Raise WorldsOfOne if Horovod's world size is not the launcher's: N worlds of one would train N times."""
    if launcher.size is None or launcher.size == horovod_size:
        return
    rebuild = "Use the launcher of the MPI that Horovod was built with, or rebuild it with this one (env/setup.sh)."
    hint = WITH_PMIX if launcher.name == "srun" else rebuild
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
            f" world of one. {WITH_PMIX}"
        )


def slurm_nodes(environ: Mapping[str, str]) -> str:
    """Slurm's list of the nodes of this step, such as gpu[1-4],login. Raises UserError if it is missing."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UserError("The nodes of this job step are unknown (SLURM_STEP_NODELIST is not set). Start with srun.")
    return nodes


def slurm_port(environ: Mapping[str, str]) -> int:
    """A port for the tasks of this Slurm step. Other steps and jobs get other ports."""
    job, step = (number(environ, name) or 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 10_000 + (job * 1009 + step) % 20_000


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
    nodes, tasks = _requested(environ)
    # TASKS_PER_NODE may be "2(x3)" or "2,1": take the first node's number.
    first = {"SLURM_TASKS_PER_NODE": re.split(r"[(,]", environ.get("SLURM_TASKS_PER_NODE", "1"))[0]}
    tasks = tasks or number(first, "SLURM_TASKS_PER_NODE", 1) or 1
    return Allocation(nodes, tasks, number(environ, "SLURM_CPUS_PER_TASK", 1))


def _requested(environ: Mapping[str, str]) -> tuple[int, int | None]:
    """The job's nodes, and the tasks per node that it requested; None without such a request."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1) or number(environ, "SLURM_NNODES", 1) or 1
    return nodes, number(environ, "SLURM_NTASKS_PER_NODE", 1)


def requested_tasks(environ: Mapping[str, str]) -> int:
    """The tasks of the Slurm job around this process; of the step, where the job did not request a number per node.

    1 in a sweep, which also trains on fewer ranks than the job has tasks.
    """
    if IN_SWEEP in environ:
        return 1
    nodes, per_node = _requested(environ)
    return max(number(environ, "SLURM_NTASKS") or 1, nodes * (per_node or 0))
