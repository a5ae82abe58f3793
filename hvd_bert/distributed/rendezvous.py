"""Where ranks meet: what the launcher gave them, made into what torch.distributed or Horovod asks for."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # there, but for type checkers
from torch.distributed.rendezvous import rendezvous

from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError

TIMEOUT_S = 300  # for a rank that starts late; afterwards the group's own timeout counts
MET_TIMEOUT_S = 30  # where all ranks are there already; torch tries for two to three times as long


def torchrun_store() -> Any:
    """The key-value store of torchrun's agent, which every process of the launch sees; a restart finds it empty."""
    store, _, _ = next(iter(rendezvous("env://")))
    return PrefixStore(f"hvd_bert/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def store_at(host: str, port: int, rank: int, size: int, patience_s: float = TIMEOUT_S) -> Any:
    """A key-value store that rank 0 keeps at host:port. Raises UserError where it cannot be met there, or some do not.

    Port 0 is any free one, for rank 0: it waits for none of the others, who cannot know it yet. `patience_s`: seconds.
    """
    patience, waits = timedelta(seconds=patience_s), port != 0
    try:
        return TCPStore(host, port, size, is_master=rank == 0, timeout=patience, wait_for_workers=waits)
    except RuntimeError as error:
        raise UserError(
            f"{socket.gethostname()} cannot meet the other ranks at {host}{f':{port}' if port else ''}"
            f" ({str(error).splitlines()[0]}): all hosts must know that host's name and let each other connect"
            f"{', and nobody else may listen at the port' if waits else ''}."
        ) from None


def store_of(world: World, address: str) -> Any:
    """A key-value store of a world's ranks, which rank 0 keeps at its `address` and a port that is free there.

    Raises CollectiveError on all ranks where one of them cannot meet the others.
    """
    store = None
    with world.raise_on_all_ranks():
        if world.rank == 0:
            store = store_at(address, 0, 0, world.size, MET_TIMEOUT_S)
    address, port = world.broadcast((address, store and store.port))
    with world.raise_on_all_ranks():
        return store or store_at(address, port, world.rank, world.size, MET_TIMEOUT_S)


def address_of(interface: str | None) -> str | None:
    """An IPv4 address of a network interface of this host; None where it has none."""
    addresses = psutil.net_if_addrs().get(interface or "", [])
    return next((str(address.address) for address in addresses if address.family == socket.AF_INET), None)


def interface_to(host: str) -> str | None:
    """The network interface by which this host reaches `host`; None where that cannot be told."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # no packet is sent: it only finds the way
            mine = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == mine for address in addresses):
            return str(name)
    return None


def serve_horovod() -> None:
    """Give this process of torchrun what horovodrun --gloo would: its place, and the address of a key-value store.

    Rank 0 keeps the store, as long as its process lives.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torchrun_store()
    if rank == 0:
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        store.set("hvd_bert.horovod", f"{os.environ['MASTER_ADDR']} {server.start()}")
        server.init([])  # it need not know who will come
    address, port = store.get("hvd_bert.horovod").decode().split()
    local_rank, local_size = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    place = {
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
    os.environ.update({name: str(value) for name, value in place.items()})
    choose_interface(store, rank, size, "HOROVOD_GLOO_IFACE")


def choose_interface(store: Any, rank: int, size: int, variable: str) -> None:
    """Name in `variable` the interface by which this rank's host reaches another of the world's hosts.

    Gloo would take the one that the host's own name leads to, which on many systems is the loopback.
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
