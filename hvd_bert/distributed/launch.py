"""Detect the launcher of this process from its environment variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from hvd_bert.distributed.launchers import BY_TORCH, LAUNCHERS, LauncherRow, launcher_row
from hvd_bert.errors import EXIT_OK, UserError


class LaunchError(UserError):
    """A mistake in how the job was started. Every process detects it, and rank 0 reports it."""


@dataclass(frozen=True)
class Launcher:
    """The launcher that started this process, with the world size and this process's rank.

    Without a launcher, `name` is "none", and `size` and `rank` are None. If only MPI knows the world size, `name` is
    ASKS_MPI and `size` is None. `store`: the key-value store of a program's process group; None under a launcher.
    """

    name: str
    size: int | None
    rank: int | None
    store: Any = None

    @property
    def row(self) -> LauncherRow:
        """The launcher's row of LAUNCHERS."""
        return launcher_row(self.name)

    @property
    def has_store(self) -> bool:
        """Whether the ranks have a key-value store for their rendezvous (`rendezvous.launcher_store`)."""
        return self.store is not None or bool(self.row.store)

    @property
    def is_alone(self) -> bool:
        """Whether this is the only process. False if only MPI knows the world size."""
        return self.name == "none" or self.size == 1


ASKS_MPI = "MPI"
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torch's rendezvous variables
# Rank variables of PRRTE, Hydra with -pmi-port, PALS and ALPS, which set no world size: only MPI knows it.
_MPI_RANKS = ("PMIX_RANK", "PMI_ID", "PALS_RANKID", "ALPS_APP_PE")
# The launchers' variables for the local rank, most specific launcher first.
_LOCAL_RANKS = ["HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"]
_LOCAL_RANKS += ["LOCAL_RANK", "JSM_NAMESPACE_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID"]
GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
PTY = "SLURM_PTY_PORT"  # set by `srun --pty bash`, where only the first task runs the shell
WITH_PMIX = (
    "Start with `srun --mpi=pmix` (`srun --mpi=list` shows what this Slurm has), or with mpirun or horovodrun. Without"
    " PMIx and MPI, use --strategy ddp."
)
WITHOUT_HOROVOD = (
    "Without Horovod: --strategy ddp under torchrun or srun, or --strategy none in one process (docs/start/install.md)."
)
GLOO_TIMEOUT_S = 30  # Horovod's default, in seconds
GLOO_S_PER_RANK = 4


def number(environ: Mapping[str, str], name: str, minimum: int = 0) -> int | None:
    """Parse the whole number in a variable; None if the variable is not set.

    Raises UserError if its value is not a whole number, or is below `minimum`.
    """
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
    """Return `name` if it is a valid host name. Raises UserError, which begins with `source`, if not, such as a..b."""
    try:
        name.encode("idna")
    except UnicodeError as error:
        reason = error.__cause__ or error
        raise UserError(
            f"{source}: {name[:80]!r} is not a valid host name ({reason}). Give a host's name or address."
        ) from None
    return name


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher of this process. Raises UserError if its world size or rank is invalid."""
    found = [names for names in _variables() if environ.keys() >= {*names[1:]}]
    if not found:
        ranks = mpi_ranks(environ)
        return Launcher(ASKS_MPI, None, number(environ, ranks[0])) if ranks else Launcher("none", None, None)
    launcher, size_name, rank_name, *_ = found[0]
    if found[-1][0] == BY_TORCH and environ[size_name] == "1" and environ["WORLD_SIZE"] != "1":
        launcher, size_name, rank_name = found[-1]  # one process per node was launched; torch's variables cover all
    size, rank = number(environ, size_name, 1), number(environ, rank_name)
    if rank is not None and size is not None and rank >= size:
        raise UserError(
            f"{rank_name}={rank} must be below {size_name}={size}: ranks count from 0. Fix the variables, or unset them"
            " if they are left over from another job."
        )
    return Launcher(launcher, size, rank)


def _variables() -> list[tuple[str, ...]]:
    """List each launcher's name, size variable, rank variable and other variables, most specific launcher first."""
    return [(name, *names) for name, row in LAUNCHERS.items() for names in row.variables]


def other_sizes(launcher: Launcher, environ: Mapping[str, str]) -> dict[str, str]:
    """Return {variable: world size} for launcher variables that contradict `launcher`. Sizes 0 and 1 are ignored."""
    names = dict.fromkeys(size for _, size, *_ in _variables())
    if launcher.row.by_mpi:
        del names["SLURM_STEP_NUM_TASKS"]  # these tasks may be daemons of mpirun or flux, not ranks
    found = {name: environ[name][:80] for name in names if environ.get(name, "").isdecimal()}
    return {name: value for name, value in found.items() if value not in ("0", "1", str(launcher.size))}


def speaks_first(environ: Mapping[str, str]) -> bool:
    """Return whether this process reports the mistakes that all processes detect before joining.

    Rank 0 does, and so does a process whose rank is unknown. If each srun task has started a launcher, only the rank 0
    of the first task does.
    """
    try:
        launcher = find_launcher(environ)
        return launcher.rank in (None, 0) and (environ.get("SLURM_PROCID") == "0" or not is_nested(launcher, environ))
    except UserError:
        return True  # its rank is unknown


def speaks_for_host(environ: Mapping[str, str]) -> bool:
    """Return whether this process reports its errors before joining.

    The first rank of each host does, and every process without a launcher or a variable for its local rank.
    """
    try:
        alone = find_launcher(environ).is_alone
    except UserError:
        return True
    local_rank = next((environ[name] for name in _LOCAL_RANKS if name in environ), None)
    return alone or local_rank in (None, "0")


def silent_status(environ: Mapping[str, str], status: int) -> int:
    """Return the exit status of a rank that fails before it joins, if another rank reports the error.

    It is 0 under launchers that end all ranks at the first failure, so that the other rank has time to report; under
    other launchers it is `status`.
    """
    return status if find_launcher(environ).row.each_status_counts else EXIT_OK


def ancestors() -> set[str]:
    """Return the names of this process's ancestors on this host; empty if this process may not see them."""
    import psutil  # imported late, so that a missing psutil is reported once

    try:
        return {process.name() for process in psutil.Process().parents()}
    except psutil.Error:
        return set()


def is_nested(
    launcher: Launcher, environ: Mapping[str, str], programs: Callable[[], Collection[str]] = ancestors
) -> bool:
    """Return whether srun has started several tasks, each of which has started mpirun or horovodrun."""
    if (number(environ, "SLURM_STEP_NUM_TASKS", 1) or 1) == 1 or PTY in environ:
        return False
    if launcher.name == "horovodrun":
        return True
    # mpirun starts its daemons on other nodes by srun, so their ranks have a step's variables without being nested.
    return launcher.name == "mpirun" and not {"mpirun", "mpiexec", "orterun", "prterun"}.isdisjoint(programs())


def mpi_ranks(environ: Mapping[str, str]) -> list[str]:
    """Return those of _MPI_RANKS that are set."""
    return [name for name in _MPI_RANKS if name in environ]


@dataclass(frozen=True)
class Rule:
    """A mistake in the launcher's variables: its condition, error message and exception class."""

    when: Callable[[Launcher, Mapping[str, str]], bool]
    message: str
    error: type[UserError] = UserError


def _has_two_worlds(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether torch's variables describe a world of a different size than srun's."""
    several = launcher.name == "srun" and launcher.size != 1 and all(map(environ.get, RENDEZVOUS))
    return several and environ["WORLD_SIZE"] != str(launcher.size)


def _has_only_rank(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether RANK is set without WORLD_SIZE. RANK=0 alone is accepted, since it may be left over."""
    rank, others = environ.get("RANK"), any(environ.get(name) for name in RENDEZVOUS if name != "RANK")
    return launcher.name == "none" and bool(rank) and (others or rank != "0")


_ALONE = (
    " is set for several processes, but this one lacks its rank or the address of the others: each would train alone."
    f" Start with torchrun, horovodrun, mpirun or srun, or set {', '.join(RENDEZVOUS)} in each"
    " (docs/guides/strategies.md). To train in one process: --strategy none."
)
RULES = {
    "a launcher in each task": Rule(
        is_nested,
        "Each of srun's {environ[SLURM_STEP_NUM_TASKS]} tasks has started {launcher.name} with {launcher.size} ranks."
        " Use one launcher: `srun --mpi=pmix python ...`, or {launcher.name} without srun.",
        LaunchError,
    ),
    "no address": Rule(
        lambda launcher, environ: (
            launcher.name == BY_TORCH and launcher.size != 1 and not all(map(environ.get, RENDEZVOUS))
        ),
        "RANK={launcher.rank} and WORLD_SIZE={launcher.size} are set, but not both MASTER_ADDR and MASTER_PORT, through"
        " which the ranks find each other. Set all of them, or unset RANK to train in this process alone.",
    ),
    "two worlds": Rule(
        _has_two_worlds,
        "srun started {launcher.size} tasks, but WORLD_SIZE={environ[WORLD_SIZE]} is set, too. Start all ranks with"
        " srun and unset RANK, or start one task per node with torchrun in it.",
        LaunchError,
    ),
    "a larger world": Rule(  # except WORLD_SIZE, which job scripts export
        lambda launcher, environ: launcher.is_alone and bool(other_sizes(launcher, environ).keys() - {"WORLD_SIZE"}),
        "{sizes}" + _ALONE,
    ),
    "a rank alone": Rule(_has_only_rank, "RANK={environ[RANK]:.80}" + _ALONE),
}


def checked_launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher of this process. Raises UserError if one of RULES applies."""
    launcher = find_launcher(environ)
    sizes = ", ".join(f"{name}={value}" for name, value in other_sizes(launcher, environ).items())
    for rule in RULES.values():
        if rule.when(launcher, environ):
            raise rule.error(rule.message.format(launcher=launcher, environ=environ, sizes=sizes))
    return launcher


def horovodrun_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the address and port of the server through which horovodrun's ranks meet over Gloo; None over MPI."""
    host, port = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT", 1)
    return (host, port) if host and port else None


def gloo_timeout_s(environ: Mapping[str, str]) -> int:
    """Return how many seconds started ranks may take to find each other over Gloo: GLOO_TIMEOUT or its default."""
    return number(environ, GLOO_TIMEOUT, 1) or GLOO_TIMEOUT_S


def extend_gloo_timeout(launcher: Launcher, environ: MutableMapping[str, str]) -> None:
    """Increase Gloo's timeout for a large world, unless the user has set it.

    Each rank asks the launcher, a single Python process, for the addresses of all others, so the time grows with the
    square of the world size. Horovod elastic keeps the default, which determines how soon a lost host is noticed.
    """
    needed = GLOO_S_PER_RANK * (launcher.size or 1)
    if needed > GLOO_TIMEOUT_S and not is_elastic(environ):
        environ.setdefault(GLOO_TIMEOUT, str(needed))


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return whether Horovod elastic runs this process: horovodrun with --min-np and --host-discovery-script."""
    return environ.get("HOROVOD_ELASTIC") == "1"


def world_size_warning(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """Return a warning if WORLD_SIZE suggests several processes, but this one trains alone; else ""."""
    if launcher.name != "none" or "WORLD_SIZE" not in other_sizes(launcher, environ):
        return ""
    return (
        f"WORLD_SIZE={environ['WORLD_SIZE'][:40]} is ignored, since RANK is not set: this process trains alone. To"
        " start several, use a launcher (docs/guides/strategies.md)."
    )
