"""The launcher of a process, from its variables.

These functions only read their arguments, so that tests need no cluster.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain

import psutil

from hvd_bert.errors import UserError


class LaunchError(UserError):
    """A mistake in how the job was started, which all of its processes find. Rank 0 reports it."""


@dataclass(frozen=True)
class Launcher:
    """What started this process, by its variables. Without a launcher, `size` and `rank` are None.

    `size` is also None where only MPI knows it (ASKS_MPI).
    """

    name: str
    size: int | None
    rank: int | None


@dataclass(frozen=True)
class Variables:
    """A launcher's variables of the world size and of the rank, and those that must be set as well."""

    launcher: str
    size: str
    rank: str
    others: tuple[str, ...] = ()


TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun sets it
# torch's env:// rendezvous: Kubeflow's PyTorchJob, Volcano, Azure ML, Vertex AI, Run:ai, deepspeed, mp.spawn, by hand.
BY_TORCH = "torch's variables"
TORCHS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ASKS_MPI = "MPI"
_PER_NODE = "PET_NPROC_PER_NODE"  # torchrun's --nproc-per-node: Kubeflow's WORLD_SIZE counts these processes
# Most specific first: mpirun inside srun inherits Slurm's variables, never the other way round. Except for torchrun,
# horovodrun, srun and torch's variables, MPI's library connects the ranks.
_LAUNCHERS = (
    Variables("torchrun", "WORLD_SIZE", "RANK", (TORCHRUN,)),
    Variables("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    Variables("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    Variables("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    Variables("mpirun", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"),
    Variables("mpirun", "PMI_SIZE", "PMI_RANK"),
    Variables("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    Variables("flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    Variables("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    Variables(BY_TORCH, "WORLD_SIZE", "RANK"),
)
# Ranks of launchers that tell no size (PRRTE, Hydra with -pmi-port, PALS, ALPS) or whose size is missing: MPI is asked.
_RANKS_OF_MPI = (
    *("PMIX_RANK", "PMI_ID", "PALS_RANKID", "ALPS_APP_PE"),
    *(row.rank for row in _LAUNCHERS if row.launcher in ("mpirun", "jsrun", "flux")),
)
# Variables that tell of several processes, but not the rank of this one.
_SIZES_ALONE = ("PET_NNODES", _PER_NODE, "TF_CONFIG", "SM_HOSTS", "SUBMITIT_LOCAL_NTASKS")
# Which platform has set torch's variables.
_PLATFORMS = {
    "PET_NNODES": "Kubeflow", "VC_TASK_INDEX": "Volcano", "AZUREML_RUN_ID": "Azure ML", "RUNAI_JOB_NAME": "Run:ai",
    "CROSS_SIZE": "deepspeed",
}  # fmt: skip
GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
PTY = "SLURM_PTY_PORT"  # of `srun --pty bash`: only its first task has a terminal
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


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher of this process, from its environment. Raises UserError if its variables are no ranks of a world."""
    rows = [row for row in _LAUNCHERS if {row.size, row.rank, *row.others} <= environ.keys()]
    if len(rows) > 1 and rows[0].launcher == "srun" and environ[rows[0].size] == "1":
        del rows[0]  # one step per node, each a rank of torch's variables
    if not rows:
        ranks = _ranks_of_mpi(environ)
        return Launcher(ASKS_MPI, None, number(environ, ranks[0])) if ranks else Launcher("none", None, None)
    row = rows[0]
    size, rank = number(environ, row.size, 1), number(environ, row.rank)
    if rank is not None and size is not None and rank >= size:
        raise UserError(
            f"{row.rank}={rank} must be below {row.size}={size}: ranks count from 0. Fix the variables, or unset them"
            " if they are left over from another job."
        )
    return Launcher(row.launcher, size, rank)


def ignored(launcher: Launcher, environ: Mapping[str, str]) -> list[str]:
    """The variables that tell of several processes, but of another number than the launcher's."""
    names = dict.fromkeys([*(row.size for row in _LAUNCHERS), *_SIZES_ALONE])
    return [name for name in names if _told(environ.get(name, "")) not in (1, launcher.size)]


def platform_of(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """The launcher's name in a report: for torch's variables with the platform that has set them, where it is known."""
    if launcher.size is None:
        return "no launcher" if launcher.name == "none" else "a launcher of MPI, which is asked for the ranks"
    found = [name for variable, name in _PLATFORMS.items() if variable in environ]
    return f"{found[0]} ({BY_TORCH})" if found and launcher.name == BY_TORCH else launcher.name


def _told(text: str) -> int:
    """The number of processes in a variable: a number, min:max, or JSON with the names of hosts; else 1."""
    if re.fullmatch(r"(?:[0-9]{1,9}:)?[0-9]{1,9}", text):
        return max(1, int(text.rpartition(":")[2]))
    try:
        told = json.loads(text)
        hosts = chain(*told["cluster"].values()) if isinstance(told, dict) else told
        return max(1, len(list(hosts)))
    except (ValueError, TypeError, LookupError, AttributeError):
        return 1


def speaks_first(environ: Mapping[str, str]) -> bool:
    """Whether this process reports what all find before they have joined: rank 0, or one without a launcher."""
    try:
        launcher = find_launcher(environ)
        is_first = environ.get("SLURM_PROCID") == "0" or not is_nested(launcher, environ)
        return launcher.rank in (None, 0) and is_first
    except UserError:
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


def _ranks_of_mpi(environ: Mapping[str, str]) -> list[str]:
    return [name for name in _RANKS_OF_MPI if name in environ]


def checked_launcher(environ: Mapping[str, str]) -> Launcher:
    """The launcher of this process, for a world of all ranks. Raises UserError if it does not make one world."""
    launcher = find_launcher(environ)
    _check_nesting(launcher, environ)
    _check_variables(launcher, environ)
    return launcher


def _check_nesting(launcher: Launcher, environ: Mapping[str, str]) -> None:
    if is_nested(launcher, environ):
        tasks = environ["SLURM_STEP_NUM_TASKS"]
        raise LaunchError(
            f"Each of srun's {tasks} tasks has started {launcher.name} with {launcher.size} ranks. Use one launcher:"
            f" `srun --mpi=pmix python ...`, or {launcher.name} without srun."
        )


def _check_variables(launcher: Launcher, environ: Mapping[str, str]) -> None:
    """Refuse variables that tell of several processes, but not how they find each other: each would train alone."""
    missing = [name for name in TORCHS if not environ.get(name)]
    if launcher.name == BY_TORCH and _told(environ.get(_PER_NODE, "")) > 1:
        raise UserError(
            f"{_PER_NODE}={environ[_PER_NODE]}: WORLD_SIZE={launcher.size} counts processes of torchrun. Start with"
            " `torchrun -m hvd_bert.train`, which takes the number of nodes and processes from these variables."
        )
    if launcher.name == BY_TORCH and launcher.size != 1 and missing:
        raise UserError(
            f"RANK={launcher.rank} and WORLD_SIZE={launcher.size} are set, but not {' and '.join(missing)}, through"
            " which the ranks find each other. Set all of them, or unset RANK to train in this process alone."
        )
    if launcher.name != "none":
        return
    unused = [name for name in ignored(launcher, environ) if name != "WORLD_SIZE"]  # which job scripts export
    if "RANK" in environ and (environ["RANK"] != "0" or len(missing) < len(TORCHS) - 1):
        unused.append("RANK")
    if unused:
        raise UserError(
            f"{unused[0]}={environ[unused[0]][:80]} is set for several processes, but this one lacks its rank or the"
            " address of the others: each would train alone. Start with torchrun, horovodrun, mpirun or srun, or set"
            f" {', '.join(TORCHS)} in each (docs/guides/strategies.md). To train in one process: --strategy none."
        )


def horovodrun_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Where horovodrun serves the addresses of its ranks over Gloo; None if it does not."""
    host, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT", 1)
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


def check_size(launcher: Launcher, horovod_size: int, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if Horovod's world size is not the launcher's: N worlds of one would train N times."""
    if launcher.name == ASKS_MPI and horovod_size == 1:
        raise UserError(  # of each, since each is alone
            f"{_ranks_of_mpi(environ)[0]} is set: a launcher of MPI started this process. But it did not tell the size,"
            " and Horovod sees a world of one. Start with the launcher of the MPI that Horovod was built with. To train"
            " in this process alone: --strategy none."
        )
    if launcher.size is None or launcher.size == horovod_size:
        return
    rebuild = "Use the launcher of the MPI that Horovod was built with, or rebuild it with this one (env/setup.sh)."
    hint = WITH_PMIX if launcher.name == "srun" else rebuild
    raise LaunchError(
        f"{launcher.name} started {launcher.size} processes, but Horovod sees a world of {horovod_size}: they cannot"
        f" find each other, and each would train alone. {hint}"
    )


def check_pmi(launcher: Launcher, environ: Mapping[str, str], mpi: str) -> None:
    """Raise LaunchError if srun started the tasks without PMI: Open MPI would abort each in MPI_Init.

    Other MPIs are left to `check_size`: those based on MPICH may use Slurm's oldest PMI, which sets no variable.
    """
    if launcher.name != "srun" or launcher.size == 1 or not mpi.startswith("Open MPI"):
        return
    if not any(name.startswith(("PMIX_", "PMI_", "PMI2_")) for name in environ):
        raise LaunchError(
            f"srun started {launcher.size} processes without PMIx: they cannot find each other, and each would be a"
            f" world of one. {WITH_PMIX}"
        )


def check_mpi(environ: Mapping[str, str], mpi: str) -> None:
    """Raise LaunchError if another MPI's mpirun started this process. MPICH would abort it in MPI_Init.

    `mpi`: the version text of the MPI library. Of others than these two families nothing is known.
    """
    mpich = re.search(r"MPICH|MVAPICH|Intel\(R\) MPI", mpi) is not None
    if "OMPI_COMM_WORLD_SIZE" in environ and mpich:
        started_by = "Open MPI"
    elif "MPI_LOCALNRANKS" in environ and mpi.startswith("Open MPI"):
        started_by = "MPICH or Intel MPI"
    else:
        return
    own = " ".join(mpi.splitlines()[0].partition(",")[0].split())
    raise LaunchError(
        f"The mpirun of {started_by} started this job, but Horovod and mpi4py use {own}: the processes cannot find each"
        " other. Use the mpirun of that MPI, or load this one's module and rerun `bash env/setup.sh`."
    )


def without_local_rank(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The words of a command line without --local_rank, which deepspeed and torch.distributed.launch add.

    Raises UserError if its value is not the launcher's.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--local_rank", "--local-rank", nargs="?", const="")
    given, rest = parser.parse_known_args(words)
    own = environ.get("LOCAL_RANK", "not set")
    if given.local_rank not in (None, own):
        raise UserError(
            f"--local_rank {given.local_rank[:40]}: LOCAL_RANK is {own}. Remove the flag: launchers that need it add"
            " it, and set the variable."
        )
    return rest


def note_on_one_process(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Why this process trains alone, where several seem to be requested; None otherwise."""
    # accelerate sets MASTER_PORT only for several processes.
    if launcher.name == "none" and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= environ.keys():
        return (
            "accelerate launch started a single process, although several were requested: it trains alone. On GPUs add"
            " --multi_gpu; on CPUs start with torchrun or horovodrun."
        )
    if launcher.name == "none" and "WORLD_SIZE" in ignored(launcher, environ):
        return (
            f"WORLD_SIZE={environ['WORLD_SIZE'][:40]} is ignored, since RANK is not set: this process trains alone. To"
            " start several, use a launcher (docs/guides/strategies.md)."
        )
    return None
