"""The world of Horovod's ranks, under any launcher, in a program's process group or in a single process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import torch

from hvd_bert.distributed import mpi, watchdog
from hvd_bert.distributed.horovod_rendezvous import join_horovodrun, serve_horovod
from hvd_bert.distributed.interfaces import (
    address_towards,
    apply_setting,
    check_own_name,
    interface_address,
    is_loopback,
)
from hvd_bert.distributed.launch import (
    WITHOUT_HOROVOD,
    Launcher,
    checked_launcher,
    extend_gloo_timeout,
    horovodrun_address,
    is_elastic,
    number,
)
from hvd_bert.distributed.rendezvous import world_store
from hvd_bert.distributed.world import CollectiveError, ProcessState, World
from hvd_bert.errors import UserError, log

ASK_S = 5.0  # seconds between checks of Horovod's thread while this rank waits for an operation
# Elastic training ends with this error: Horovod keeps the operation, which would disturb this process's next world.
QUEUED_TOO_LATE = "Horovod has been shut down while this rank queued an operation"


def ready_for_timeline(environ: MutableMapping[str, str]) -> None:
    """Set Horovod's variables for a timeline of selected steps, unless the user has. Call before `hvd.init`."""
    environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    # With Horovod's response cache, timelines lack the times at which each rank was ready (docs/guides/profiling.md).
    environ.setdefault("HOROVOD_CACHE_CAPACITY", "0")


class HorovodWorld(World):
    """The world of Horovod's ranks."""

    def __init__(self, hvd: Any, controller: str, comm: Any, stalled_after_s: float) -> None:
        self._hvd = hvd
        self._comm = comm
        self.controller = controller
        self.rank = hvd.rank()
        self.size = hvd.size()
        self.local_rank = hvd.local_rank()
        self.local_size = hvd.local_size()
        self.cross_rank = hvd.cross_rank()
        self._stalled_after_s = stalled_after_s
        super().__init__()

    @staticmethod
    def join(group: Launcher | None = None, process: ProcessState | None = None) -> HorovodWorld:
        """Join the launcher's world, or the program's `group`. Raises UserError if the ranks cannot form one world."""
        process = process or ProcessState()
        launcher = group or checked_launcher(os.environ)
        extend_gloo_timeout(launcher, os.environ)
        if launcher.is_alone:
            # A single process does not need MPI, which on some clusters starts only inside a job.
            os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
        with _loading():
            import horovod.torch as hvd
            import horovod.torch.mpi_ops  # noqa: F401  # horovod.torch hides why its library fails to load
        served = launcher.has_store and not launcher.row.by_mpi and not launcher.is_alone
        if served:
            os.environ.update(serve_horovod(launcher))
        else:
            apply_setting(os.environ)
        if launcher.name == "horovodrun":
            os.environ.update(join_horovodrun())
        by_mpi = hvd.mpi_built() and os.environ.get("HOROVOD_CONTROLLER", "mpi").lower() == "mpi"
        with _loading():
            comm = mpi.join(launcher) if by_mpi else None
        elastic = is_elastic(os.environ)
        if elastic:
            process.watch_hosts()
        stalled_after_s = watchdog.configure_stall_limits(os.environ, elastic)
        if not by_mpi and not served:  # `meet` has checked served ranks
            _check_own_name()
        before = _connections_now() if elastic else set()
        hvd.init()
        if not by_mpi:
            _pause_between_polls(process)
        if not elastic:  # under elastic, the launcher's size is that of the first world
            mpi.check_size(launcher, hvd.size(), os.environ)
        controller = "none" if hvd.size() == 1 else "mpi" if by_mpi else "gloo"
        world = HorovodWorld(hvd, controller, comm, stalled_after_s)
        world.elastic = elastic
        if elastic:
            process.connections = _connections_now() - before
        return world

    def set_up_device(self) -> None:
        super().set_up_device()
        if self.size > 1 and not self.elastic:
            self.watch(self._stalled_after_s, self._store())

    def _store(self) -> Any:
        """Return a key-value store for the watchdog; None, with a warning, if a rank cannot reach it."""
        try:
            return world_store(self, "HOROVOD_GLOO_IFACE")
        except CollectiveError as error:  # raised on all ranks; training works without a store
            if self.rank == 0:
                log.warning("If a rank stalls, it cannot be named: %s", error)
            return None

    def _take_device(self) -> tuple[str, str | None]:
        device, device_id = super()._take_device()
        if device != "cpu" and self.size > 1 and not self._hvd.nccl_built():
            raise UserError(
                "Horovod was built without NCCL and cannot average gradients on GPUs. Build it again with"
                " `bash env/setup.sh --with-nccl`, or hide the GPUs (CUDA_VISIBLE_DEVICES= ) to train on CPUs."
            )
        return device, device_id

    def allgather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        with self._guard_slow_wait():
            if self._comm is not None:
                return list(self._comm.allgather(value))
            # Without a name, Horovod 0.28 uses the value's type as the name: ranks with different types would hang.
            return list(self._hvd.allgather_object(value, name="hvd_bert.allgather"))

    def gather(self, value: Any) -> list[Any]:
        if self.size > 1 and self._comm is not None:
            with self._guard_slow_wait():
                return list(self._comm.gather(value) or ())
        return super().gather(value)  # Horovod does not provide gather

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return values
        # Without a name, each call would get a new name and fill Horovod's response cache of 1024 names.
        name = f"hvd_bert.sum.{values.dtype}.{'x'.join(map(str, values.shape))}"
        with self.limit_wait(lambda: ["a sum of measurements"]):
            return torch.as_tensor(self._hvd.allreduce(values, op=self._hvd.Sum, name=name))

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor], root: int = 0) -> None:
        if self.size > 1:
            with self.limit_wait(lambda: sorted(tensors)):
                self._hvd.broadcast_parameters(sorted(tensors.items()), root_rank=root)

    def any_rank_async(self, mine: bool) -> Callable[[], bool]:
        if self.size == 1:
            return lambda: mine
        flag = torch.tensor([int(mine)], dtype=torch.int32)  # Horovod does not fuse integers with the gradients
        handle = self._hvd.allreduce_async(flag, op=self._hvd.Sum, name="hvd_bert.vote")

        def count() -> bool:
            with self.limit_wait(lambda: ["the vote on stopping"]):
                return bool(self._hvd.synchronize(handle).item())

        return count

    def _guard_slow_wait(self) -> AbstractContextManager[None]:
        """Context manager: allow other ranks LONGEST_S to finish independent work, such as tokenizing."""
        return self.limit_wait(lambda: ["the next collective"], watchdog.LONGEST_S)

    def start_timeline(self, path: Path) -> None:
        self._hvd.start_timeline(str(path))

    def stop_timeline(self) -> None:
        self._hvd.stop_timeline()

    def close(self) -> None:
        try:
            self.allgather(None)
        except RuntimeError:  # a rank is lost; under Horovod elastic the remaining ranks have finished
            if not self.elastic:
                raise
        self.leave()

    def leave(self) -> None:
        super().leave()
        self._hvd.shutdown()


@contextmanager
def _loading() -> Iterator[None]:
    """Context manager: convert an error in loading Horovod or MPI to a UserError."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "horovod":
            raise UserError(f"Horovod is not installed. `bash env/setup.sh` builds it. {WITHOUT_HOROVOD}") from None
        raise UserError(
            f"Horovod or MPI cannot be loaded ({error}). Load the modules that were loaded at set-up, or rerun"
            f" `bash env/setup.sh` with the current ones. {WITHOUT_HOROVOD}"
        ) from None


def disconnect(process: ProcessState) -> None:
    """Close Gloo's connections after a rank is lost, so that ranks that wait for this rank fail at once.

    Horovod 0.28 keeps the connections open until it joins the next world (`ProcessSet::Finalize` does nothing). The
    other ranks would wait for HOROVOD_GLOO_TIMEOUT_SECONDS.
    """
    for descriptor, *_ in process.connections & _connections_now():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _connections_now() -> set[tuple[Any, ...]]:
    """Return this process's TCP connections as tuples: descriptor, local address, remote address."""
    return {(tcp.fd, tcp.laddr, tcp.raddr) for tcp in psutil.Process().net_connections("tcp")}


def _check_own_name() -> None:
    """Raise UserError if Horovod's Gloo cannot listen at the address of this host's own name."""
    where = horovodrun_address(os.environ)
    address = interface_address(os.environ.get("HOROVOD_GLOO_IFACE")) or (where and address_towards(where[0]))
    several = (number(os.environ, "HOROVOD_CROSS_SIZE") or 1) > 1  # counts host names, and a host may have several
    check_own_name(address, beyond_this_host=several and address is not None and not is_loopback(address))


def _pause_between_polls(process: ProcessState) -> None:
    """Patch Horovod's function that waits for an operation, so that it sleeps between polls.

    In Horovod 0.28.1, `synchronize` (horovod/torch/mpi_ops.py) calls `WaitAndClear` (horovod/torch/mpi_ops_v2.cc),
    which polls without pauses and has no setting for them. On CPUs this takes time from Horovod's own thread, which
    sends the gradients, and from other ranks on the same cores. Apply it under Gloo only: MPI's own thread polls as
    well, so sleeping makes steps slower. In tests of four ranks on two cores, it changed the time under Gloo from 72
    to 41 s, and under MPI from 50 to 63 s.
    """
    from horovod.torch.mpi_ops import mpi_lib

    original = mpi_lib.horovod_torch_wait_and_clear
    wait = getattr(original, "__wrapped__", original)  # unwraps an earlier world's patch

    @wraps(wait)
    def wait_and_clear(handle: int) -> None:
        asked, ended = time.monotonic(), False
        try:
            while not mpi_lib.horovod_torch_poll(handle):
                time.sleep(5e-5)
                if time.monotonic() > asked + ASK_S:
                    if ended:
                        raise RuntimeError(QUEUED_TOO_LATE)
                    asked, ended = time.monotonic(), not _is_running()
            wait(handle)
        except RuntimeError:
            # Disconnect before files are closed, which may wait for a checkpoint: other ranks would wait for this rank.
            disconnect(process)
            raise

    mpi_lib.horovod_torch_wait_and_clear = wait_and_clear


def _is_running() -> bool:
    """Return whether Horovod's thread still runs. It ends when a rank is lost.

    An operation stays in the queue forever if the thread ends while `EnqueueTensorAllreduces` adds it
    (horovod/common/operations.cc). To find out, this calls alltoall with invalid splits: RuntimeError means that the
    thread has ended. ValueError means that it runs, since `EnqueueTensorAlltoall` checks the thread before the splits.
    """
    from horovod.torch.mpi_ops import alltoall_async

    try:
        alltoall_async(torch.zeros(1), splits=torch.zeros(1, 1, dtype=torch.int32))
    except ValueError:
        return True
    except RuntimeError:
        pass
    return False
