"""The world: who this process is among its peers, where it runs, and what all of them do together.

Here is what all worlds share, and the world of one; `horovod_world.py` and `torch_world.py` talk to other ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch

from hvd_bert.distributed import logs
from hvd_bert.distributed.launch import RankInfo, check_devices, choose_device, choose_threads, find_job, share_cores
from hvd_bert.distributed.logs import log
from hvd_bert.errors import EXIT_BAD_INPUT, UserError

__all__ = ["CollectiveError", "HostsChanged", "World", "log"]


class CollectiveError(UserError):
    """An error that every rank knows of, so that the world can be left in good order; `rank` is the one to say it.

    `mine`: whether that is this rank, where there is no world yet to compare with.
    """

    def __init__(self, message: str, rank: int = 0, status: int = EXIT_BAD_INPUT, mine: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status
        self.mine = mine


class HostsChanged(Exception):
    """Horovod elastic has hosts to add or to remove; every rank knows, and all that is to be kept is on disk."""


class World:
    """Rank, size, device and the collectives: of a world of one. Every method that communicates is called by all ranks.

    Attributes: `rank` in `size` ranks; `local_rank` in `local_size` on this host; `cross_rank` in `cross_size`: the
    number of this host among the hosts; `controller`: what the ranks talk through, "mpi", "gloo", "torch.distributed"
    or "none"; `device`; `devices`: how many GPUs this rank drives; `elastic`: whether ranks may be lost and come;
    `generation`: of how many worlds this process was a rank before; `rank_infos`: one RankInfo per rank; `host_ranks`:
    the ranks on this host.
    """

    controller = "none"
    rank = local_rank = cross_rank = 0
    size = local_size = cross_size = 1
    devices = 1
    elastic = False
    generation = 0
    _comm: Any = None  # mpi4py's communicator of all ranks, where MPI started them

    def __init__(self) -> None:
        self.host = socket.gethostname()
        self.device = torch.device("cpu")
        self.rank_infos: tuple[RankInfo, ...] = ()
        self.host_ranks: tuple[int, ...] = (self.rank,)

    def set_up_device(self) -> None:
        """Find out where every rank sits; take a device and threads. Raises CollectiveError where devices are short."""
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
                " shows an older one, take a torch of that (docs/start/install.md):"
                " `bash env/setup.sh --torch 2.8.0`."
            ) from None

    def set_threads(self, num_threads: int | None) -> None:
        """CPU threads of this rank; None: OMP_NUM_THREADS, or else a fair share of the cores left to it."""
        here = [self.rank_infos[rank].cores for rank in self.host_ranks]
        torch.set_num_threads(
            num_threads or choose_threads(os.environ, share_cores(self.rank_infos[self.rank].cores, here))
        )

    @property
    def hosts(self) -> list[str]:
        """The hosts in rank order, each once."""
        return list(dict.fromkeys(info.host for info in self.rank_infos))

    @property
    def job(self) -> dict[str, str] | None:
        """The Slurm job that the world runs in (`find_job`)."""
        return find_job(os.environ)

    def describe(self) -> list[str]:
        """For the log: the world in a line, the Slurm job, and host by host which rank has which device."""
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

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.allgather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on rank 0; an empty list on the others."""
        values = self.allgather(value)
        return values if self.rank == 0 else []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks."""
        return values

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Rank 0's tensors, in place, into those of every rank; all have the same names, shapes and types."""

    def any_rank_async(self, mine: bool) -> Callable[[], bool]:
        """Start to ask whether any rank says yes; the answer comes by calling the result. One vote at a time.

        It travels beside the step's gradients (and never in one buffer with them: its type is another).
        """
        return lambda: mine

    def start_timeline(self, path: Path, mark_cycles: bool) -> None:
        """Rank 0 alone: have Horovod take down in a new file what tensors go through from now on."""
        raise NotImplementedError("only Horovod has a timeline")

    def stop_timeline(self) -> None:
        """Rank 0 alone: close that file. Returns when all is written."""
        raise NotImplementedError("only Horovod has a timeline")

    def waiting(self, names: Callable[[], Sequence[str]]) -> AbstractContextManager[None]:
        """Around a wait for what all ranks do in a step: Horovod's worlds end the job if one does not come to it.

        `names`: what has not come yet, for the message.
        """
        return nullcontext()

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise CollectiveError if a value differs between ranks: hosts that hold other files would train on other
        data."""
        everyone = self.allgather(dict(values))
        for name, value in everyone[0].items():
            for info, theirs in zip(self.rank_infos, everyone, strict=True):
                if theirs[name] != value:
                    raise CollectiveError(
                        f"{name} differs: {value} on {self.rank_infos[0].host} (rank 0), {theirs[name]} on {info.host}"
                        f" (rank {info.rank}). Give all hosts the same files and settings."
                    )

    @contextmanager
    def raise_on_all_ranks(self, status: int = EXIT_BAD_INPUT) -> Iterator[None]:
        """What is done inside succeeds on all ranks or fails on all: a UserError of one becomes a CollectiveError of
        all.

        `status`: the exit status of such a failure. No collective may stand inside: a rank that fails would leave the
        others waiting in it. A warning that several ranks give inside is one line, with the list of ranks.
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
            where = "" if len(failed) == self.size else f"rank {first} on {self._host_of(first)}: "
            raise CollectiveError(where + messages[first], first, status, mine=self.rank == first)

    def _host_of(self, rank: int) -> str:
        return self.rank_infos[rank].host if self.rank_infos else "its host"

    def close(self) -> None:
        """Leave the world in good order, once every rank has come this far."""

    def leave(self) -> None:
        """Leave a world whose other ranks may be gone."""

    def end(self, status: int) -> NoReturn:
        """Leave the world in good order, once every rank has come this far, and end this process.

        Whether `finally` and `with` around this call still run depends on the world.
        """
        self.close()
        sys.exit(status)

    def abort(self, status: int) -> NoReturn:
        """End every rank now: one that failed alone must not leave the others waiting for it."""
        logs.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        if self._comm is not None:
            self._comm.Abort(status)
        os._exit(status)  # the launcher sees the status and ends the others
