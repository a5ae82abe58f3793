"""Rendezvous of the ranks for torch.distributed and Horovod, from what each launcher provides."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing in its type stubs
from torch.distributed.rendezvous import rendezvous

from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError

TIMEOUT_S = 300  # for ranks that start late; later the group's own timeout applies
MET_TIMEOUT_S = 30  # for ranks that have all started; torch tries for two to three times as long


def torchrun_store() -> Any:
    """The key-value store of torchrun's agent, with other keys after each restart."""
    store, _, _ = next(iter(rendezvous("env://")))
    return PrefixStore(f"hvd_bert/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def store_at(host: str, port: int, rank: int, size: int, patience_s: float = TIMEOUT_S) -> Any:
    """A key-value store that rank 0 serves at host:port. Raises UserError if ranks do not reach it in `patience_s`.

    With port 0, rank 0 takes a free one and does not wait for the others, which do not have its number yet.
    """
    patience, waits = timedelta(seconds=patience_s), port != 0
    try:
        return TCPStore(host, port, size, is_master=rank == 0, timeout=patience, wait_for_workers=waits)
    except RuntimeError as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach the other ranks at {host}{f':{port}' if port else ''}"
            f" ({str(error).splitlines()[0]}). All hosts must resolve that host's name and accept connections from"
            f" each other{', and no other program may listen at the port' if waits else ''}."
        ) from None


def store_of(world: World, address: str) -> Any:
    """A key-value store for a world's ranks, which rank 0 serves at its `address` and a free port.

    Raises CollectiveError on all ranks if one of them cannot reach it.
    """
    store = None
    with world.raise_on_all_ranks():
        if world.rank == 0:
            store = store_at(address, 0, 0, world.size, MET_TIMEOUT_S)
    address, port = world.broadcast((address, store and store.port))
    with world.raise_on_all_ranks():
        return store or store_at(address, port, world.rank, world.size, MET_TIMEOUT_S)


def address_of(interface: str | None) -> str | None:
    """An IPv4 address of a network interface of this host; None if it has none."""
    addresses = psutil.net_if_addrs().get(interface or "", [])
    return next((str(address.address) for address in addresses if address.family == socket.AF_INET), None)


def interface_to(host: str) -> str | None:
    """The network interface through which this host reaches `host`; None if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends no packet, only chooses the route
            mine = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == mine for address in addresses):
            return str(name)
    return None


def serve_horovod() -> None:
    """Set what horovodrun --gloo would set, for a process of torchrun: its ranks, and the address of a key-value store.

    Rank 0 serves the store until its process ends.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torchrun_store()
    if rank == 0:
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        store.set("hvd_bert.horovod", f"{os.environ['MASTER_ADDR']} {server.start()}")
        server.init([])  # it needs no list of ranks
    address, port = store.get("hvd_bert.horovod").decode().split()
    local_rank, local_size = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    variables = {
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": local_rank,
        "HOROVOD_LOCAL_SIZE": local_size,
        "HOROVOD_CROSS_RANK": os.environ["GROUP_RANK"],
        "HOROVOD_CROSS_SIZE": os.environ["GROUP_WORLD_SIZE"],
        "HOROVOD_HOSTNAME": socket.gethostname(),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    choose_interface(store, rank, size, "HOROVOD_GLOO_IFACE")


def choose_interface(store: Any, rank: int, size: int, variable: str) -> None:
    """Set `variable` to the interface through which this host reaches the world's other hosts.

    Gloo's default is the interface of the host's own name, which on many systems is the loopback.
    """
    if variable in os.environ:
        return
    mine = socket.gethostname()
    store.set(f"hvd_bert.host.{rank}", mine)
    hosts = [store.get(f"hvd_bert.host.{other}").decode() for other in range(size)]
    other = next((host for host in hosts if host != mine), None)
    interface = interface_to(other or "localhost")
    if interface is not None:
        os.environ[variable] = interface
