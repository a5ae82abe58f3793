"""World, device and cores of a process, from the variables of the launcher and the scheduler.

These functions only decide, from their arguments (environment, counts, rank infos), so that tests need no cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
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


MAX_THREADS = 1024  # as for --num_threads
TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun sets it
# Each launcher's variables of size and rank: first those of the world, then those of parts of it.
# Most specific first: mpirun inside srun inherits Slurm's variables, never the other way round.
_LAUNCHERS = (
    ("torchrun", ("WORLD_SIZE", "RANK"), ("LOCAL_WORLD_SIZE", "LOCAL_RANK"), ("GROUP_WORLD_SIZE", "GROUP_RANK")),
    (
        "horovodrun",
        ("HOROVOD_SIZE", "HOROVOD_RANK"),
        ("HOROVOD_LOCAL_SIZE", "HOROVOD_LOCAL_RANK"),
        ("HOROVOD_CROSS_SIZE", "HOROVOD_CROSS_RANK"),
    ),
    ("mpirun", ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")),
    ("mpirun", ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")),
    ("mpirun", ("PMI_SIZE", "PMI_RANK")),
    ("srun", ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")),
)
# A launcher's variable of the world's size -> that of the rank among those of this host.
_LOCAL_RANK = {
    "WORLD_SIZE": "LOCAL_RANK",
    "HOROVOD_SIZE": "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_SIZE": "MPI_LOCALRANKID",
    "SLURM_STEP_NUM_TASKS": "SLURM_LOCALID",
}
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
    for name, world, *parts in _LAUNCHERS:
        if name == "torchrun" and TORCHRUN not in environ:
            continue  # job scripts may set these variables for other launchers
        if name == "torchrun":
            _check_torchrun(environ, *(variable for pair in (world, *parts) for variable in pair))
        if all(variable in environ for variable in world):
            for part in parts:
                _size_and_rank(environ, name, *part)
            return Launcher(name, *_size_and_rank(environ, name, *world), number(environ, _LOCAL_RANK[world[0]]))
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


def share_cores(mine: frozenset[int], on_this_host: Sequence[frozenset[int]]) -> int:
    """Threads for a rank that may use the cores `mine`, which it shares with every rank whose set overlaps."""
    sharers = sum(1 for cores in on_this_host if cores & mine)
    return max(1, len(mine) // max(1, sharers))


def choose_threads(environ: Mapping[str, str], share: int) -> int:
    """Threads per rank: OMP_NUM_THREADS, else its `share` of the cores, at most Slurm's --cpus-per-task.

    A number above MAX_THREADS is a mistake, and is ignored like a text: so many threads cannot be started.
    """
    chosen = _threads_in(environ.get("OMP_NUM_THREADS", "").split(",")[0])
    allotted = _threads_in(environ.get("SLURM_CPUS_PER_TASK", ""))
    return chosen or min(share, allotted or share)


def _threads_in(text: str) -> int | None:
    found = re.fullmatch(r" *([0-9]{1,9}) *", text)
    return int(found[1]) if found and 1 <= int(found[1]) <= MAX_THREADS else None


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
