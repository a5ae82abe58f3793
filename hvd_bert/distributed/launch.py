"""The launcher of a process, from its variables.

These functions only read their arguments, so that tests need no cluster.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hvd_bert.distributed.launchers import BY_TORCH, LAUNCHERS, LauncherRow, launcher_row
from hvd_bert.errors import UserError


class LaunchError(UserError):
    """A mistake in how the job was started, which all of its processes find. Rank 0 reports it."""


@dataclass(frozen=True)
class Launcher:
    """What started this process, by its variables. Without a launcher, `size` and `rank` are None.

    `size` is also None where only MPI knows it (ASKS_MPI). `store`: a key-value store of a program's process group.
    """

    name: str
    size: int | None
    rank: int | None
    store: Any = None

    @property
    def row(self) -> LauncherRow:
        """The facts about it."""
        return launcher_row(self.name)

    @property
    def has_store(self) -> bool:
        """Whether its ranks can meet in a key-value store: `rendezvous.launcher_store`."""
        return self.store is not None or bool(self.row.store)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process. False if only MPI knows the size."""
        return self.name == "none" or self.size == 1


ASKS_MPI = "MPI"
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torch's variables
_PER_NODE = "PET_NPROC_PER_NODE"  # torchrun's --nproc-per-node: Kubeflow's WORLD_SIZE counts these processes
# Ranks of launchers that set no size: PRRTE, Hydra with -pmi-port, PALS, ALPS. MPI is asked.
_MPI_RANKS = ("PMIX_RANK", "PMI_ID", "PALS_RANKID", "ALPS_APP_PE")
# Numbers or lists of processes or hosts, without a rank of this process: torchrun's options, TensorFlow's, Vertex AI's,
# SageMaker's, SkyPilot's, submitit's.
_SIZES_ALONE = ["PET_NNODES", _PER_NODE, "TF_CONFIG", "CLUSTER_SPEC", "SM_HOSTS"]
_SIZES_ALONE += ["SKYPILOT_NUM_NODES", "SUBMITIT_LOCAL_NTASKS"]
# Which platform has set torch's variables.
_PLATFORMS = {
    "PET_NNODES": "Kubeflow",
    "VC_TASK_INDEX": "Volcano",
    "AZUREML_RUN_ID": "Azure ML",
    "RUNAI_JOB_NAME": "Run:ai",
    "CROSS_SIZE": "deepspeed",
}
GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
PTY = "SLURM_PTY_PORT"  # set by `srun --pty bash`, whose first task alone has a terminal
WITH_PMIX = "Start with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm has), or with mpirun or horovodrun."
WITHOUT_HOROVOD = (
    "Without Horovod: --strategy ddp under torchrun or srun, or --strategy none in one process (docs/start/install.md)."
)
GLOO_TIMEOUT_S = 30  # Horovod's default
GLOO_S_PER_RANK = 4


def number(environ: Mapping[str, str], name: str, minimum: int = 0) -> int | None:
    """A variable that holds a whole number; None if it is not set. Raises UserError if it holds anything else."""
    text = environ.get(name)
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,10}", text) is None or int(text) < minimum:
        raise UserError(
            f"{name}={text[:40]!r}: must be a whole number from {minimum}. Unset it, or start with the launcher that"
            " sets it."
        )
    return int(text)


def host_name(name: str, source: str) -> str:
    """The name, if a resolver accepts it. Raises UserError, which names its source, for others, such as a..b."""
    try:
        name.encode("idna")
    except UnicodeError as error:
        reason = error.__cause__ or error
        raise UserError(
            f"{source}: {name[:80]!r} is not a valid host name ({reason}). Give a host's name or address."
        ) from None
    return name


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher of this process, from its environment. Raises UserError if its variables are no ranks of a world."""
    found = [each for each in _variables() if environ.keys() >= {*each[1:]}]
    if not found:
        ranks = mpi_ranks(environ)
        return Launcher(ASKS_MPI, None, number(environ, ranks[0])) if ranks else Launcher("none", None, None)
    launcher, size_name, rank_name, *_ = found[0]
    if found[-1][0] == BY_TORCH and environ[size_name] == "1" and environ["WORLD_SIZE"] != "1":
        launcher, size_name, rank_name = found[-1]  # one process per node, each with its rank in a larger world
    size, rank = number(environ, size_name, 1), number(environ, rank_name)
    if rank is not None and size is not None and rank >= size:
        raise UserError(
            f"{rank_name}={rank} must be below {size_name}={size}: ranks count from 0. Fix the variables, or unset them"
            " if they are left over from another job."
        )
    return Launcher(launcher, size, rank)


def _variables() -> list[tuple[str, ...]]:
    """Each launcher's name and its variables: of the size, of the rank, and others. Most specific first."""
    return [(name, *names) for name, row in LAUNCHERS.items() for names in row.variables]


def ignored(launcher: Launcher, environ: Mapping[str, str]) -> list[str]:
    """The variables for several processes whose number is not the launcher's."""
    names = dict.fromkeys([*(size for _, size, *_ in _variables()), *_SIZES_ALONE])
    return [name for name in names if _process_count(environ.get(name, "")) not in (1, launcher.size)]


def platform_name(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """The launcher's name in a report: for torch's variables with the platform that has set them, where it is known."""
    if launcher.size is None:
        return "no launcher" if launcher.name == "none" else "a launcher of MPI, which is asked for the ranks"
    found = [name for variable, name in _PLATFORMS.items() if variable in environ]
    return f"{found[0]} ({BY_TORCH})" if found and launcher.name == BY_TORCH else launcher.name


def _process_count(text: str) -> int:
    """The processes in a variable: a number, min:max, or JSON with lists of hosts; else 1."""
    if re.fullmatch(r"(?:[0-9]{1,9}:)?[0-9]{1,9}", text):
        return max(1, int(text.rpartition(":")[2]))
    try:
        parsed = json.loads(text)
        hosts = list(chain(*parsed["cluster"].values())) if isinstance(parsed, dict) else parsed
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return 1
    return max(1, len(hosts)) if isinstance(hosts, list) else 1


def speaks_first(environ: Mapping[str, str]) -> bool:
    """Whether this process reports what all find before they have joined: rank 0, or one without a launcher."""
    try:
        launcher = find_launcher(environ)
        return launcher.rank in (None, 0) and (environ.get("SLURM_PROCID") == "0" or not is_nested(launcher, environ))
    except UserError:
        return True  # its rank is unknown


def ancestors() -> set[str]:
    """The names of the programs that started this process on this host, where it may see them."""
    import psutil  # imported late: without psutil, the reason is still reported once

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


def mpi_ranks(environ: Mapping[str, str]) -> list[str]:
    """The variables of a rank of MPI that are set. Slurm's is none of them: a job script has it, too."""
    own = [rank for name, _, rank, *_ in _variables() if LAUNCHERS[name].by_mpi and not LAUNCHERS[name].store]
    return [name for name in (*_MPI_RANKS, *own) if name in environ]


def checked_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher of this process, for a world of all ranks. Raises UserError if it does not make one world."""
    launcher = find_launcher(environ)
    if is_nested(launcher, environ):
        tasks = environ["SLURM_STEP_NUM_TASKS"]
        raise LaunchError(
            f"Each of srun's {tasks} tasks has started {launcher.name} with {launcher.size} ranks. Use one launcher:"
            f" `srun --mpi=pmix python ...`, or {launcher.name} without srun."
        )
    _check_variables(launcher, environ)
    return launcher


def _check_variables(launcher: Launcher, environ: Mapping[str, str]) -> None:
    """Refuse variables for several processes that cannot find each other: each would train alone."""
    missing = [name for name in RENDEZVOUS if not environ.get(name)]
    if launcher.name == BY_TORCH and _process_count(environ.get(_PER_NODE, "")) > 1:
        raise UserError(
            f"{_PER_NODE}={environ[_PER_NODE]}: WORLD_SIZE={launcher.size} counts processes of torchrun. Start with"
            " `torchrun -m hvd_bert.train`, which takes the number of nodes and processes from these variables."
        )
    if launcher.name == BY_TORCH and launcher.size != 1 and missing:
        raise UserError(
            f"RANK={launcher.rank} and WORLD_SIZE={launcher.size} are set, but not {' and '.join(missing)}, through"
            " which the ranks find each other. Set all of them, or unset RANK to train in this process alone."
        )
    if launcher.name == "srun" and launcher.size != 1 and not missing and environ["WORLD_SIZE"] != str(launcher.size):
        raise LaunchError(
            f"srun started {launcher.size} tasks, but WORLD_SIZE={environ['WORLD_SIZE']} and RANK={environ['RANK']} are"
            " set, too. Start all ranks with srun and unset RANK, or start one task per node with torchrun in it."
        )
    if not launcher.is_alone:
        return
    unused = [name for name in ignored(launcher, environ) if name != "WORLD_SIZE"]  # job scripts export it
    others = any(environ.get(name) for name in RENDEZVOUS if name != "RANK")
    if launcher.name == "none" and environ.get("RANK") and (others or environ["RANK"] != "0"):
        unused.append("RANK")
    if unused:
        raise UserError(
            f"{unused[0]}={environ[unused[0]][:80]} is set for several processes, but this one lacks its rank or the"
            " address of the others: each would train alone. Start with torchrun, horovodrun, mpirun or srun, or set"
            f" {', '.join(RENDEZVOUS)} in each (docs/guides/strategies.md). To train in one process: --strategy none."
        )


def horovodrun_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where horovodrun serves the addresses of its ranks over Gloo; None if it does not."""
    name = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
    host, port = environ.get(name), number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT", 1)
    return (host_name(host, name), port) if host and port else None


def gloo_timeout_s(environ: Mapping[str, str]) -> int:
    """Seconds in which ranks that have started must find each other over Gloo. Horovod reads the same variable."""
    return number(environ, GLOO_TIMEOUT, 1) or GLOO_TIMEOUT_S


def extend_gloo_timeout(launcher: Launcher, environ: MutableMapping[str, str]) -> None:
    """Give the ranks of a large world longer to find each other over Gloo. Keeps what the user has set.

    Each asks the launcher, one Python process, for the addresses of all others, so the time grows with the square of
    the world size. Not under Horovod elastic, where a lost host is noticed by it.
    """
    needed = GLOO_S_PER_RANK * (launcher.size or 1)
    if needed > GLOO_TIMEOUT_S and not is_elastic(environ):
        environ.setdefault(GLOO_TIMEOUT, str(needed))


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether this is Horovod elastic: horovodrun with --min-np and --host-discovery-script."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def note_on_one_process(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Why this process trains alone, where several seem to be requested; None otherwise."""
    if launcher.name != "none":
        return None
    # accelerate sets MASTER_PORT only for several processes.
    if {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= environ.keys():
        return (
            "accelerate launch started a single process, although several were requested: it trains alone. On GPUs add"
            " --multi_gpu; on CPUs start with torchrun or horovodrun."
        )
    if "WORLD_SIZE" in ignored(launcher, environ):
        return (
            f"WORLD_SIZE={environ['WORLD_SIZE'][:40]} is ignored, since RANK is not set: this process trains alone. To"
            " start several, use a launcher (docs/guides/strategies.md)."
        )
    return None
