"""The world of torch.distributed's ranks, for strategies other than Horovod's, under any launcher or in a group."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from hvd_bert.distributed import rendezvous, watchdog
from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.interfaces import apply_setting, choose_interface
from hvd_bert.distributed.launch import Launcher, checked_launcher, is_elastic
from hvd_bert.distributed.world import World

# Long, since ranks wait while another rank writes a checkpoint or finishes its share of an evaluation. Gloo notices a
# dead rank at once, and the watchdog ends a step that takes too long.
TIMEOUT = timedelta(hours=2)


class DistributedWorld(World):
    """torch.distributed's ranks: Gloo between CPUs, NCCL between GPUs."""

    controller = "torch.distributed"

    def __init__(self, rank: int, size: int, comm: Any = None, store: Any = None, own: Any = None) -> None:
        """`store`: a key-value store of all ranks. `comm`: mpi4py's communicator of all ranks, if MPI started them.

        `own`: a Gloo group for CPU tensors, if the program has initialized the default process group.
        """
        self.rank, self.size, self._comm, self._store, self._own = rank, size, comm, store, own
        super().__init__()
        hosts = self.allgather(self.host)
        self.local_rank, self.local_size = hosts[:rank].count(self.host), Counter(hosts)[self.host]
        self.cross_rank = list(dict.fromkeys(hosts)).index(self.host)

    @staticmethod
    def join(group: Launcher | None = None) -> DistributedWorld:
        """Join the launcher's world, or the program's `group`. Raises UserError if the ranks cannot form one world."""
        launcher = group or checked_launcher(os.environ)
        rank, size, comm = launcher.rank or 0, launcher.size or 1, None
        interface = "GLOO_SOCKET_IFNAME"
        if launcher.has_store and size > 1:
            store = rendezvous.launcher_store(launcher)
            rendezvous.meet(store, launcher, interface)
        elif launcher.is_alone:
            apply_setting(os.environ)
            store = distributed.HashStore()  # type: ignore[attr-defined]  # missing in its type stubs
            choose_interface(os.environ, interface, [])
        else:
            # Meet through Horovod, which supports the different ways in which horovodrun and MPI share addresses.
            meeting = HorovodWorld.join()
            rank, size, comm = meeting.rank, meeting.size, meeting._comm
            others = [host for host in meeting.allgather(meeting.host) if host != meeting.host]
            with meeting.raise_on_all_ranks():
                choose_interface(os.environ, interface, others)
            store = rendezvous.world_store(meeting, interface)
            meeting.close()
        if group is not None:
            # Collectives of CPU tensors and objects need Gloo and a long timeout, which the program's group may lack.
            own = distributed.new_group(backend="gloo", timeout=TIMEOUT)
            return DistributedWorld(rank, size, store=store, own=own)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        world = DistributedWorld(rank, size, comm, store)
        world.elastic = is_elastic(os.environ)  # refused later: only Horovod supports elastic training
        return world

    def set_up_device(self) -> None:
        super().set_up_device()
        if self.size > 1:
            # The watchdog needs a connection of its own, since another thread may be waiting on the first one.
            store = distributed.PrefixStore("hvd_bert.waits", self._store.clone())  # type: ignore[attr-defined]
            self.watch(watchdog.configure_stall_limits(os.environ, elastic=False), store)
        if self.device.type == "cuda" and self._own is None:
            with self.limit_wait(lambda: ["the connection of NCCL"]):
                self._join_again("cpu:gloo,cuda:nccl", self.device)

    def _join_again(self, backend: str, device: torch.device | None) -> None:
        """Initialize the process group again, with this rank's device, so that NCCL connects at once.

        The first group does not use NCCL, which would fail if two ranks share a GPU. `set_up_device` checks that first.
        """
        store = distributed.PrefixStore("hvd_bert.devices", self._store)  # type: ignore[attr-defined]
        rendezvous.exchange(store, self.rank, self.size, "host", "")  # waits until no rank uses the first group
        distributed.destroy_process_group()
        distributed.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT, device_id=device
        )

    def allgather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._own)
        return values

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        distributed.gather_object(value, values or None, group=self._own)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        total = values.clone()
        distributed.all_reduce(total, group=self._group_for(total))
        return total

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor], root: int = 0) -> None:
        for _, tensor in sorted(tensors.items()):
            distributed.broadcast(tensor, src=root, group=self._group_for(tensor))

    def _group_for(self, tensor: torch.Tensor) -> Any:
        """Return the group for collectives on a tensor; None for the default group."""
        return self._own if tensor.device.type == "cpu" else None

    def any_rank_async(self, mine: bool) -> Callable[[], bool]:
        flag = torch.tensor([int(mine)], dtype=torch.int32)
        work = distributed.all_reduce(flag, group=self._own, async_op=True)

        def count() -> bool:
            with self.limit_wait(lambda: ["the vote on stopping"]):
                work.wait()
            return bool(flag.item())

        return count

    def close(self) -> None:
        self.allgather(None)  # not distributed.barrier, which uses NCCL: only Gloo notices a dead rank at once
        self.leave()

    def leave(self) -> None:
        super().leave()
        if distributed.is_initialized():  # false if NCCL failed to connect
            distributed.destroy_process_group(self._own)  # None: the default group
            self._own = None  # frees the group, which closes its connections
