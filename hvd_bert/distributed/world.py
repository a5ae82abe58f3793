"""The world: rank, size and device of this process, and the collectives.

The base class is the world of a single process; `horovod_world.py` and `torch_world.py` have subclasses for ranks.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch

from hvd_bert.distributed import logs, watchdog
from hvd_bert.distributed.devices import (
    RankInfo,
    check_devices,
    choose_device,
    choose_threads,
    physical_id,
    share_cores,
)
from hvd_bert.distributed.slurm import find_job
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, UserError, find_user_error
from hvd_bert.machine import cpu_limit
from hvd_bert.storage.writing import writing_to

ABORT_S = 20  # limit in seconds for MPI_Abort


class CollectiveError(UserError):
    """An error that all ranks raise, so that they leave the world together.

    `status`: the exit status. `mine`: whether this rank reports the error; by default, rank 0 does.
    """

    def __init__(self, message: str, status: int = EXIT_BAD_INPUT, mine: bool | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.mine = mine


class HostsChanged(Exception):
    """Raised on all ranks, after the same step, if Horovod elastic has hosts to add or remove."""


@dataclass(eq=False)
class ProcessState:
    """State of a process across the successive worlds of Horovod elastic.

    Attributes:
        generation: Number of worlds before the current one.
        hosts_changed: Whether Horovod has hosts to add or remove. Horovod notifies rank 0 once, from its own thread.
        connections: TCP connections that Gloo has made in the current world.
        locks: Locks of the output folders in use.
        last_state: Training state after the last finished step.
    """

    generation: int = 0
    hosts_changed: bool = False
    connections: set[tuple[Any, ...]] = field(default_factory=set)
    locks: dict[Path, Any] = field(default_factory=dict)
    last_state: Any = None

    def watch_hosts(self) -> None:
        """Reset `hosts_changed`, since a new world includes all earlier changes, and register for further changes."""
        from horovod.common.elastic import notification_manager

        self.hosts_changed = False
        notification_manager.init()  # repeating this call or the next has no effect
        notification_manager.register_listener(self)

    def on_hosts_updated(self, time: float, kind: int) -> None:
        """Note that Horovod has hosts to add or remove. Horovod calls this."""
        self.hosts_changed = True


class World:
    """Rank, size, device and collectives of a process; this class is the world of a single process.

    Every rank must call each collective.

    Attributes:
        rank, size: This process's rank, and the world size.
        local_rank, local_size: This process's rank on its host, and the number of ranks on this host.
        cross_rank: Number of this host, from 0.
        launcher: The launcher's name (launchers.py).
        controller: The library of the collectives: "mpi", "gloo", "torch.distributed" or "none".
        device, devices: The main device of this rank, and the number of GPUs that it uses.
        elastic: Whether training continues when ranks are lost or added.
        rank_infos: One RankInfo per rank.
        host_ranks: The ranks on this host.
    """

    launcher = controller = "none"
    rank = local_rank = cross_rank = 0
    size = local_size = 1
    devices = 1
    elastic = False
    _comm: Any = None  # mpi4py's communicator of all ranks, if MPI started them
    _watchdog: watchdog.Watchdog | None = None

    def __init__(self) -> None:
        self.process = ProcessState()
        self.host = socket.gethostname()
        self.device = torch.device("cpu")
        self.rank_infos: tuple[RankInfo, ...] = ()
        self.host_ranks: tuple[int, ...] = (self.rank,)

    def set_up_device(self) -> None:
        """Choose device and CPU threads, and gather `rank_infos`. Raises CollectiveError if a device is unusable."""
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
            return name, physical_id(torch.cuda.get_device_properties(name))
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"{name} cannot be used ({error}). This torch is built for CUDA {torch.version.cuda}: if `nvidia-smi`"
                " shows an older version, install a torch for that (docs/start/install.md):"
                " `bash env/setup.sh --torch-index https://download.pytorch.org/whl/cu126`."
            ) from None

    def set_threads(self, num_threads: int | None) -> None:
        """Set the number of CPU threads. Default: the result of `choose_threads` for an equal share of the cores."""
        here = [self.rank_infos[rank].cores for rank in self.host_ranks]
        torch.set_num_threads(
            num_threads or choose_threads(os.environ, share_cores(self.rank_infos[self.rank].cores, here, cpu_limit()))
        )

    @property
    def gpus(self) -> list[torch.device]:
        """The GPUs of this rank, beginning with `device`. With --strategy dp there may be several."""
        if self.device.type != "cuda":
            return []
        return [self.device, *(torch.device("cuda", number) for number in range(1, self.devices))]

    @property
    def hosts(self) -> list[str]:
        """The names of all hosts in rank order, without repetition."""
        return list(dict.fromkeys(info.host for info in self.rank_infos))

    @property
    def job(self) -> dict[str, str] | None:
        """The Slurm job that the world runs in (`find_job`)."""
        return find_job(os.environ)

    def describe(self) -> list[str]:
        """Return log lines on the world, the Slurm job, and the ranks and devices of each host."""
        lines = [f"{self.size} rank(s) on {', '.join(self.hosts)}, {self.device.type}, controller {self.controller}"]
        if self.job:
            lines.append("Slurm job " + ", ".join(f"{key} {value}" for key, value in self.job.items()))
        for host in self.hosts if self.size > 1 else ():
            ranks = [f"rank {info.rank} {info.device}" for info in self.rank_infos if info.host == host]
            lines.append(f"{host}: {', '.join(ranks)}; {torch.get_num_threads()} thread(s) per rank")
        return lines

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        return [value]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the value of rank `root` on every rank."""
        return self.allgather(value if self.rank == root else None)[root]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on rank 0. Other ranks get an empty list."""
        values = self.allgather(value)
        return values if self.rank == 0 else []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum of the ranks' tensors, which must have the same shape and type."""
        return values

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor], root: int = 0) -> None:
        """Copy the tensors of rank `root` into those of the other ranks, with the same names, shapes and types."""

    def any_rank_async(self, mine: bool) -> Callable[[], bool]:
        """Start a vote. Returns a function that waits for its end, and returns whether `mine` is true on any rank.

        A vote may run alongside other collectives, such as the gradients' allreduce, but not alongside another vote.
        """
        return lambda: mine

    def start_timeline(self, path: Path) -> None:
        """Start recording Horovod's timeline in a new file; without Horovod, do nothing. Call on rank 0 only."""

    def stop_timeline(self) -> None:
        """Stop recording the timeline, and wait until the file is written; without Horovod, do nothing. Rank 0 only."""

    def watch(self, stalled_after_s: float, store: Any) -> None:
        """Start a watchdog, which ends the job if a collective takes longer than its limit.

        `stalled_after_s`: the limit for a step's collective, in seconds. `store`: see `Watchdog`.
        """
        hosts = [info.host for info in self.rank_infos]
        self._watchdog = watchdog.Watchdog(self.rank, hosts, stalled_after_s, store, self.abort)

    def limit_wait(self, names: Callable[[], Sequence[str]], at_least_s: float = 0.0) -> AbstractContextManager[None]:
        """Context manager: make the watchdog, if there is one, limit how long the block waits for other ranks.

        The limit is that of a step's collective or, if longer, `at_least_s` seconds. `names`: function that returns the
        names of the missing tensors, for the report.
        """
        if self._watchdog is None:
            return nullcontext()
        return self._watchdog.limit_wait(max(at_least_s, self._watchdog.step_s), names)

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise CollectiveError if a value differs between ranks, for example because hosts have different files."""
        everyone = self.allgather(dict(values))
        for name in dict.fromkeys(chain(*everyone)):  # a rank with different settings may have different names
            value = everyone[0].get(name)
            for info, values_there in zip(self.rank_infos, everyone, strict=True):
                theirs = values_there.get(name)
                if theirs != value:
                    raise CollectiveError(
                        f"{name} differs: {value} on {self.rank_infos[0].host} (rank 0), {theirs} on {info.host}"
                        f" (rank {info.rank}). Give all hosts the same files and settings."
                    )

    @contextmanager
    def raise_on_all_ranks(self, status: int = EXIT_BAD_INPUT) -> Iterator[None]:
        """Context manager: turn an error that a user can fix, on any rank, into a CollectiveError on all ranks.

        The block must not contain a collective, in which the other ranks would wait for the failed rank. Equal warnings
        of several ranks become one line with a list of the ranks.
        """
        message = None
        with logs.collected() as warnings:
            try:
                yield
            except Exception as error:
                mistake = find_user_error(error)
                if mistake is None:
                    raise
                message = str(mistake)
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
            raise CollectiveError(where + messages[first], status, mine=self.rank == first)

    @contextmanager
    def writing(self, flag: str, path: Path, status: int = EXIT_FAILURE) -> Iterator[bool]:
        """Context manager in which rank 0 writes the output `path` that `flag` names. Yields whether this is rank 0.

        An OSError in the block becomes a CollectiveError on all ranks.
        """
        with self.raise_on_all_ranks(status), writing_to(flag, path):
            yield self.rank == 0

    def close(self) -> None:
        """Leave the world after all ranks have called this."""
        self.leave()

    def leave(self) -> None:
        """Leave the world without waiting for other ranks, which may be gone, and release its locks."""
        if self._watchdog:
            self._watchdog.close()
        while self.process.locks:
            self.process.locks.popitem()[1].release()

    def end(self, status: int) -> NoReturn:
        """Leave the world after all ranks have called this, and end this process without finalizing Python.

        During finalization, Python aborts the process (status 134) if a thread returns from torch or frees its last
        tensor (pytorch#117762, pytorch#190489). Torch's Gloo has such threads as long as a process group is referenced,
        as by FSDP's mesh.
        """
        self.close()
        atexit.register(end_process, status)
        sys.exit(status)

    def abort(self, status: int) -> NoReturn:
        """End all ranks at once: with MPI_Abort or, without MPI, by exiting, so that the launcher ends the others."""
        logs.flush()
        sys.stdout.flush()
        sys.stderr.flush()
        if mpi := running_mpi():
            signal.alarm(ABORT_S)  # MPI_Abort may hang if the network is down
            try:
                # MPI_Abort makes Slurm kill the step at once. srun then drops output that has not reached it, often the
                # last lines of a traceback (seen with Slurm 22.05).
                if "SLURM_STEP_ID" in os.environ:
                    time.sleep(1)
            finally:  # even if Ctrl-C interrupts the sleep
                mpi.COMM_WORLD.Abort(status)
        os._exit(status)


def running_mpi() -> Any:
    """Return the module mpi4py.MPI if this process has initialized MPI and not finalized it; otherwise None."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def end_process(status: int) -> NoReturn:
    """Run all other exit functions, finalize MPI, flush standard output and error, and end this process at once."""
    atexit.unregister(end_process)
    try:
        atexit._run_exitfuncs()
        if mpi := running_mpi():
            mpi.Finalize()  # otherwise mpirun reports a crash
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
