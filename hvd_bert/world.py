"""The world: who this process is among its peers, where it runs, and what all of them do together.

The launcher made it (horovodrun, mpirun, srun --mpi=pmix; none: a world of one). Only this module, `running`, `engines`
and the doctor's measurement import Horovod.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.launch import (
    Launcher,
    Place,
    check_devices,
    check_pmi,
    check_size,
    choose_device,
    choose_threads,
    find_job,
    find_launcher,
    is_elastic,
    share_cores,
)

log = logging.getLogger("hvd_bert")


class AgreedError(UserError):
    """An error that every rank knows of, so that the world can be left in good order; `rank` is the one to say it."""

    def __init__(self, message: str, rank: int = 0, status: int = EXIT_BAD_INPUT) -> None:
        super().__init__(message)
        self.rank = rank
        self.status = status


class HostsChanged(Exception):
    """Horovod elastic has hosts to add or to remove; every rank knows, and all that is to be kept is on disk."""


class HostNotices:
    """Whether Horovod elastic has hosts to add or to remove. It tells rank 0, once, from a thread of its own."""

    def __init__(self) -> None:
        self.changed = False
        self._watches = False

    def watch(self) -> None:
        """Listen for changes from now on; those of before are in the world that is joined next."""
        from horovod.common.elastic import notification_manager

        self.changed = False
        if not self._watches:
            notification_manager.init()
            notification_manager.register_listener(self)
            self._watches = True

    def on_hosts_updated(self, time: float, kind: int) -> None:
        """Horovod's call."""
        self.changed = True


NOTICES = HostNotices()


class World:
    """Rank, size, device and the collectives. Every method that communicates must be called by all ranks.

    Attributes: `rank` in `size` ranks; `local_rank` in `local_size` on this host; `cross_rank` in `cross_size`: the
    number of this host among the hosts; `controller`: "mpi", "gloo", or "none" for a world of one; `device`;
    `elastic`: whether ranks may be lost and come; `generation`: of how many worlds this process was a rank before;
    `places`: one Place per rank; `host_ranks`: the ranks on this host; `node`: under MPI their communicator (mpi4py).
    """

    def __init__(self, hvd: Any, controller: str, comm: Any) -> None:
        self._hvd = hvd
        self._comm = comm
        self.controller = controller
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.cross_rank: int = hvd.cross_rank()
        self.cross_size: int = hvd.cross_size()
        self.host = socket.gethostname()
        self.node: Any = None
        self.device = torch.device("cpu")
        self.places: tuple[Place, ...] = ()
        self.host_ranks: tuple[int, ...] = (self.rank,)
        self.elastic = False
        self.generation = 0

    @staticmethod
    def join(generation: int = 0) -> World:
        """Join the world that the launcher made. Raises UserError where it is not one world.

        `generation`: how many worlds this process has been in before, under Horovod elastic.
        """
        launcher = find_launcher(os.environ)
        if launcher.size in (None, 1):
            # Alone: no need to start MPI, which on some clusters cannot be started outside a job.
            os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
        try:
            import horovod.torch as hvd

            by_mpi = hvd.mpi_built() and os.environ.get("HOROVOD_CONTROLLER", "mpi") == "mpi"
            comm = _mpi_world(launcher) if by_mpi else None
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(
                f"Horovod or MPI cannot be loaded ({error}): load the modules that were loaded at set-up, or run"
                " `bash env/setup.sh` with those of now."
            ) from None
        elastic = is_elastic(os.environ)
        if elastic:
            NOTICES.watch()
        hvd.init()
        if not elastic:  # there the launcher's variables stay those of the first world
            check_size(launcher, hvd.size())
        world = World(hvd, "none" if hvd.size() == 1 else "mpi" if by_mpi else "gloo", comm)
        world.elastic, world.generation = elastic, generation
        _log_on_rank_zero(world)
        if launcher.size is None and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
            log.warning("This job has %s tasks, but this is one process: start with srun.", os.environ["SLURM_NTASKS"])
        return world

    def take_place(self) -> None:
        """Find out where every rank sits; take a device and threads. Raises AgreedError where devices are short."""
        with self.together():
            name, device_id = self._take_device()
        self.device = torch.device(name)
        cores = frozenset(os.sched_getaffinity(0))
        self.places = tuple(self.allgather(Place(self.rank, self.host, self.local_rank, name, device_id, cores)))
        if self._comm is not None:
            from mpi4py import MPI

            self.node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
            self.host_ranks = tuple(self.node.allgather(self.rank))
        else:
            self.host_ranks = tuple(place.rank for place in self.places if place.host == self.host)
        with self.together():
            check_devices(self.places)
        self.set_threads(None)

    def _take_device(self) -> tuple[str, str | None]:
        name = choose_device(torch.cuda.device_count(), self.local_rank, self.local_size)
        if name == "cpu":
            return name, None
        if self.size > 1 and not self._hvd.nccl_built():
            raise UserError(
                "Horovod was built without NCCL and cannot average gradients on GPUs: build it anew with"
                " `bash env/setup.sh --with-nccl`, or hide the GPUs (CUDA_VISIBLE_DEVICES= ) to train on CPUs."
            )
        try:
            torch.cuda.set_device(name)
            return name, str(torch.cuda.get_device_properties(name).uuid)
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"{name} cannot be used ({error}). This torch is built for CUDA {torch.version.cuda}: if `nvidia-smi`"
                " shows an older one, take a torch of that (docs/install.md), e.g. `bash env/setup.sh --torch 2.8.0`."
            ) from None

    def set_threads(self, num_threads: int | None) -> None:
        """CPU threads of this rank; None: OMP_NUM_THREADS, or else a fair share of the cores left to it."""
        here = [self.places[rank].cores for rank in self.host_ranks]
        torch.set_num_threads(
            num_threads or choose_threads(os.environ, share_cores(self.places[self.rank].cores, here))
        )

    @property
    def hosts(self) -> list[str]:
        """The hosts in rank order, each once."""
        return list(dict.fromkeys(place.host for place in self.places))

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
            ranks = [f"rank {place.rank} {place.device}" for place in self.places if place.host == host]
            lines.append(f"{host}: {', '.join(ranks)}; {torch.get_num_threads()} thread(s) per rank")
        return lines

    def allgather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order."""
        if self.size == 1:
            return [value]
        if self._comm is not None:
            return list(self._comm.allgather(value))
        # Named, or Horovod 0.28 would name it by the value's type, and ranks with values of different types would
        # wait for each other for ever.
        return list(self._hvd.allgather_object(value, name="hvd_bert.allgather"))

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.allgather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on rank 0; an empty list on the others."""
        if self.size > 1 and self._comm is not None:
            return list(self._comm.gather(value) or ())
        values = self.allgather(value)  # Horovod has no gather
        return values if self.rank == 0 else []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks."""
        if self.size == 1:
            return values
        return torch.as_tensor(self._hvd.allreduce(values, op=self._hvd.Sum))

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Rank 0's tensors, in place, into those of every rank; all have the same names, shapes and types."""
        if self.size > 1:
            self._hvd.broadcast_parameters(sorted(tensors.items()), root_rank=0)

    def begin_vote(self, mine: bool) -> Callable[[], bool]:
        """Start to ask whether any rank says yes; the answer comes by calling the result. One vote at a time.

        It travels beside the step's gradients (and never in one buffer with them: its type is another).
        """
        if self.size == 1:
            return lambda: mine
        ballot = torch.tensor([int(mine)], dtype=torch.int32)
        handle = self._hvd.allreduce_async(ballot, op=self._hvd.Sum, name="hvd_bert.vote")
        return lambda: bool(self._hvd.synchronize(handle).item())

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise AgreedError if a value differs between ranks: hosts that hold other files would train on other data."""
        everyone = self.allgather(dict(values))
        for name, value in everyone[0].items():
            for place, theirs in zip(self.places, everyone, strict=True):
                if theirs[name] != value:
                    raise AgreedError(
                        f"{name} differs: {value} on {self.places[0].host} (rank 0), {theirs[name]} on {place.host}"
                        f" (rank {place.rank}). Give all hosts the same files and settings."
                    )

    @contextmanager
    def together(self, status: int = EXIT_BAD_INPUT) -> Iterator[None]:
        """What is done inside succeeds on all ranks or fails on all: a UserError of one becomes an AgreedError of all.

        `status`: the exit status of such a failure. No collective may stand inside: a rank that fails would leave the
        others waiting in it.
        """
        message = None
        try:
            yield
        except UserError as error:
            message = str(error)
        messages = self.allgather(message)
        failed = [rank for rank, text in enumerate(messages) if text is not None]
        if failed:
            first = failed[0]
            where = "" if len(failed) == self.size else f"rank {first} on {self._host_of(first)}: "
            raise AgreedError(where + messages[first], first, status)

    def _host_of(self, rank: int) -> str:
        return self.places[rank].host if self.places else "its host"

    def close(self) -> None:
        """Leave the world in good order, once every rank has come this far."""
        self.allgather(None)
        self._hvd.shutdown()

    def leave(self) -> None:
        """Leave a world whose other ranks may be gone."""
        self._hvd.shutdown()

    def abort(self, status: int) -> NoReturn:
        """End every rank now: one that failed alone must not leave the others waiting for it."""
        sys.stdout.flush()
        sys.stderr.flush()
        if self._comm is not None:
            self._comm.Abort(status)
        os._exit(status)  # under Gloo horovodrun sees the status and ends the others


def _mpi_world(launcher: Launcher) -> Any:
    """mpi4py's communicator of all ranks; initialises MPI, before Horovod does.

    Who initialises MPI also finalises it. Horovod would do so as soon as the first rank leaves, under the feet of
    ranks that still use it (segmentation faults, seen with 0.28.1); mpi4py does when its own process ends.
    """
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI

    check_pmi(launcher, os.environ, MPI.Get_library_version())
    if not torch.cuda.is_available():
        # Open MPI waits by asking again and again. On CPUs Horovod's thread would so take the core from the training
        # of its own rank: two ranks on two cores made 12.6 windows/s, and 18.1 since it lets others go first.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise UserError(
            "This MPI gives no THREAD_MULTIPLE, which Horovod's background thread needs: use an MPI built with it, or"
            " `horovodrun --gloo`."
        )
    return MPI.COMM_WORLD.Dup()  # our messages must not meet Horovod's


def _log_on_rank_zero(world: World) -> None:
    logging.basicConfig(
        format="%(message)s" if world.rank == 0 else f"rank {world.rank}: %(message)s",
        stream=sys.stdout,
        force=True,  # in a later world of Horovod elastic the rank is another one
    )
    log.setLevel(logging.INFO if world.rank == 0 else logging.ERROR)
