"""The world: rank, size and device of this process, and the collectives.

The base class is the world of a single process. `horovod_world.py` and `torch_world.py` have those of several ranks.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from hvd_bert.distributed import logs, watchdog
from hvd_bert.distributed.logs import log
from hvd_bert.distributed.slurm import find_job
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.machine import cpu_limit

MAX_THREADS = 1024  # as for --num_threads
ABORT_S = 20  # seconds that MPI_Abort may take

__all__ = ["CollectiveError", "HostsChanged", "World", "log"]


class CollectiveError(UserError):
    """An error that all ranks raise, so that they can leave the world together. `rank` reports it.

    `mine`: whether `rank` is this process, for errors before there is a world.
    """

    def __init__(self, message: str, rank: int = 0, status: int = EXIT_BAD_INPUT, mine: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status
        self.mine = mine


class HostsChanged(Exception):
    """Horovod elastic has hosts to add or remove. Raised on all ranks after the same step."""


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


def share_cores(mine: frozenset[int], on_this_host: Sequence[frozenset[int]], limit: float | None = None) -> int:
    """Threads for a rank that may use the cores `mine`, which it shares with every rank whose set overlaps.

    `limit`: the cores' worth of time that all ranks of this host may use together. More threads than that would stop
    each other: with 2 on a limit of 1 a small model trained 4 to 9 times slower than with 1.
    """
    sharers = sum(1 for cores in on_this_host if cores & mine)
    share = len(mine) // max(1, sharers)
    if limit is not None:
        share = min(share, int(limit / len(on_this_host)))
    return max(1, share)


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


class World:
    """Rank, size, device and collectives, here of a single process. All ranks must call a collective.

    Attributes:
        rank, size: This rank, and the number of ranks.
        local_rank, local_size: The same among the ranks of this host.
        cross_rank: The number of this host.
        launcher: What started the ranks, by launch.py's names.
        controller: What the ranks communicate through: "mpi", "gloo", "torch.distributed" or "none".
        device, devices: The device of this rank, and the number of GPUs that it uses.
        elastic: Whether ranks may be lost or added.
        generation: In how many worlds this process was before.
        rank_infos: One RankInfo per rank.
        host_ranks: The ranks on this host.
    """

    launcher = controller = "none"
    rank = local_rank = cross_rank = 0
    size = local_size = 1
    devices = 1
    elastic = False
    generation = 0
    _comm: Any = None  # mpi4py's communicator of all ranks, where MPI started them
    _watchdog: watchdog.Watchdog | None = None

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.device = torch.device("cpu")
        self.rank_infos: tuple[RankInfo, ...] = ()
        self.host_ranks: tuple[int, ...] = (self.rank,)

    def set_up_device(self) -> None:
        """Choose device and threads, and gather `rank_infos`. Raises CollectiveError if there are too few devices."""
        with self.raise_on_all_ranks():
            name, device_id = self._take_device()
        self.device = torch.device(name)
        cores = frozenset(os.sched_getaffinity(0))
        self.rank_infos = tuple(self.allgather(RankInfo(self.rank, self.host, self.local_rank, name, device_id, cores)))
        self.host_ranks = tuple(info.rank for info in self.rank_infos if info.host == self.host)
        with self.raise_on_all_ranks():
            check_devices(self.rank_infos)
        self.set_threads(None)

    def _take_device(self) -> tuple[str, str | None]:
        name = choose_device(torch.cuda.device_count(), self.local_rank, self.local_size)
        if name == "cpu":
            return name, None
        try:
            torch.cuda.set_device(name)
            return name, str(torch.cuda.get_device_properties(name).uuid)
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"{name} cannot be used ({error}). This torch is built for CUDA {torch.version.cuda}: if `nvidia-smi`"
                " shows an older version, install a torch for that (docs/start/install.md):"
                " `bash env/setup.sh --torch 2.8.0`."
            ) from None

    def set_threads(self, num_threads: int | None) -> None:
        """Set the CPU threads of this rank. None: OMP_NUM_THREADS, else a fair share of the cores."""
        here = [self.rank_infos[rank].cores for rank in self.host_ranks]
        torch.set_num_threads(
            num_threads or choose_threads(os.environ, share_cores(self.rank_infos[self.rank].cores, here, cpu_limit()))
        )

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs of this rank: with --strategy dp all of its process, the first one first; none on CPUs."""
        if self.device.type != "cuda":
            return []
        return [self.device, *(torch.device("cuda", number) for number in range(1, self.devices))]

    @property
    def hosts(self) -> list[str]:
        """The hosts in rank order, each once."""
        return list(dict.fromkeys(info.host for info in self.rank_infos))

    @property
    def job(self) -> dict[str, str] | None:
        """The Slurm job that the world runs in (`find_job`)."""
        return find_job(os.environ)

    def describe(self) -> list[str]:
        """Log lines: the world, the Slurm job, and per host its ranks with their devices."""
        lines = [f"{self.size} rank(s) on {', '.join(self.hosts)}, {self.device.type}, controller {self.controller}"]
        if self.job:
            lines.append("Slurm job " + ", ".join(f"{key} {value}" for key, value in self.job.items()))
        for host in self.hosts if self.size > 1 else ():
            ranks = [f"rank {info.rank} {info.device}" for info in self.rank_infos if info.host == host]
            lines.append(f"{host}: {', '.join(ranks)}; {torch.get_num_threads()} thread(s) per rank")
        return lines

    def allgather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order."""
        return [value]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The value of rank `root`, on every rank."""
        return self.allgather(value if self.rank == root else None)[root]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on rank 0; an empty list on the others."""
        values = self.allgather(value)
        return values if self.rank == 0 else []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks; of one shape and type on all of them."""
        return values

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor], root: int = 0) -> None:
        """The tensors of rank `root`, in place, into those of every rank; all have the same names, shapes and types."""

    def any_rank_async(self, mine: bool) -> Callable[[], bool]:
        """Start a vote: calling the result returns whether `mine` is true on any rank. One vote at a time.

        It runs alongside the step's gradients, and never in one buffer with them, since its type differs.
        """
        return lambda: mine

    def start_timeline(self, path: Path) -> None:
        """On rank 0 only: have Horovod record its timeline in a new file from now on."""
        raise NotImplementedError("only Horovod has a timeline")

    def stop_timeline(self) -> None:
        """On rank 0 only: close the timeline. Returns when it is written."""
        raise NotImplementedError("only Horovod has a timeline")

    def watch(self, stalled_after_s: float, store: Any) -> None:
        """From now on, a rank that does not reach a step's collective ends the job. `store`: see `Arrivals`."""
        hosts, arrivals = [info.host for info in self.rank_infos], watchdog.Arrivals(store, self.rank, self.size)
        self._watchdog = watchdog.Watchdog(self.rank, hosts, stalled_after_s, arrivals, self.abort)

    def waiting(self, names: Callable[[], Sequence[str]], at_least_s: float = 0.0) -> AbstractContextManager[None]:
        """Around a wait for other ranks, by default in a step's collective, of at most the watchdog's limit.

        `names`: what has not arrived yet, for the message.
        """
        if self._watchdog is None:
            return nullcontext()
        return self._watchdog.over(max(at_least_s, self._watchdog.step_s), names)

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise CollectiveError if a value differs between ranks, for example because their hosts' files differ."""
        everyone = self.allgather(dict(values))
        for name, value in everyone[0].items():
            for info, values_there in zip(self.rank_infos, everyone, strict=True):
                theirs = values_there.get(name)  # a rank with other settings may have other names
                if theirs != value:
                    raise CollectiveError(
                        f"{name} differs: {value} on {self.rank_infos[0].host} (rank 0), {theirs} on {info.host}"
                        f" (rank {info.rank}). Give all hosts the same files and settings."
                    )

    @contextmanager
    def raise_on_all_ranks(self, status: int = EXIT_BAD_INPUT) -> Iterator[None]:
        """Turn a UserError of one rank inside into a CollectiveError on all ranks, with exit status `status`.

        No collective may be inside: a rank that fails would leave the others waiting in it. Equal warnings of several
        ranks inside become one line with the list of ranks.
        """
        message = None
        with logs.collected() as warnings:
            try:
                yield
            except UserError as error:
                message = str(error)
            mine = warnings[:]
            everyone = self.allgather((message, mine))
            del warnings[: len(mine)]
        if self.rank == 0:
            logs.show([theirs for _, theirs in everyone])
        messages = [text for text, _ in everyone]
        failed = [rank for rank, text in enumerate(messages) if text is not None]
        if failed:
            first = failed[0]
            host = self.rank_infos[first].host if self.rank_infos else "its host"
            where = "" if len(failed) == self.size else f"rank {first} on {host}: "
            raise CollectiveError(where + messages[first], first, status, mine=self.rank == first)

    def close(self) -> None:
        """Leave the world, once all ranks have called this."""

    def leave(self) -> None:
        """Leave a world whose other ranks may be gone."""
        if self._watchdog:
            self._watchdog.stopped.set()

    def disconnect(self) -> None:
        """Let the other ranks notice that a rank is lost."""

    def end(self, status: int) -> NoReturn:
        """Leave the world, once all ranks have called this, and end this process.

        Whether `finally` and `with` around this call still run depends on the world.
        """
        self.close()
        sys.exit(status)

    def abort(self, status: int) -> NoReturn:
        """End all ranks now: the others must not wait for a rank that failed alone."""
        logs.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        if self._comm is not None:
            abort_mpi(self._comm, status)
        os._exit(status)  # the launcher sees the status and ends the others


def abort_mpi(comm: Any, status: int) -> None:
    """End all ranks of MPI. Under srun after a pause, in which srun receives the last output of this rank.

    MPI_Abort makes Slurm kill the step at once. srun then drops what it has not yet received, often the last lines of
    a traceback (seen with Slurm 22.05), and no interface tells a task what srun has received.

    A rank that cannot reach mpirun, since its host has lost the network, would stay in MPI_Abort: SIGALRM ends it.
    """
    signal.alarm(ABORT_S)
    try:
        if "SLURM_STEP_ID" in os.environ:
            time.sleep(1)
    finally:  # also after Ctrl-C
        comm.Abort(status)
