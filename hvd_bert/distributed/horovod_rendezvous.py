"""Rendezvous of Horovod's ranks over Gloo. Provides horovodrun's server and variables under other launchers, too."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence

from hvd_bert.distributed.interfaces import address_towards, interface_address
from hvd_bert.distributed.launch import Launcher, gloo_timeout_s, horovodrun_address, is_elastic
from hvd_bert.distributed.rendezvous import joins, launcher_store, meet, store_host
from hvd_bert.errors import UserError


class AddressServer:
    """Server through which the ranks exchange addresses. Unlike horovodrun's, it listens at one address only.

    It runs until the process ends. `otherwise`: the address to listen at if HOROVOD_GLOO_IFACE is not set.
    `address`: the server's address and port.
    """

    def __init__(self, otherwise: str) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        host = interface_address(os.environ.get("HOROVOD_GLOO_IFACE")) or otherwise
        server = RendezvousHTTPServer((host, 0), RendezvousHandler, verbose=0)  # RendezvousServer listens everywhere
        server.init([])  # an empty list of ranks: serving addresses does not need it
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.address = (host, int(server.server_port))


def horovod_env(hosts: Sequence[str], rank: int, address: tuple[str, int]) -> dict[str, str]:
    """Return the variables that horovodrun --gloo sets for a rank.

    `hosts`: the host of each rank. `address`: the server's address and port.
    """
    local_rank = hosts[:rank].count(hosts[rank])
    across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]  # hosts with this local rank
    values = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "HOSTNAME": hosts[rank],
        "RANK": rank,
        "SIZE": len(hosts),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": hosts.count(hosts[rank]),
        "CROSS_RANK": across.index(hosts[rank]),
        "CROSS_SIZE": len(across),
    }
    return {f"HOROVOD_{name}": str(value) for name, value in values.items()} | _address_env(*address)


def _address_env(host: str, port: int | str) -> dict[str, str]:
    return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": host, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}


def serve_horovod(launcher: Launcher) -> dict[str, str]:
    """Meet the other ranks in the launcher's store, and return the variables that horovodrun would set for this rank.

    Rank 0 starts the server. `meet` sets HOROVOD_GLOO_IFACE.
    """
    rank, store = launcher.rank or 0, launcher_store(launcher)
    hosts = meet(store, launcher, "HOROVOD_GLOO_IFACE")
    if rank == 0:
        server = AddressServer(address_towards(store_host(store)) or "127.0.0.1")
        store.set("hvd_bert.horovod", " ".join(map(str, server.address)))
    host, port = store.get("hvd_bert.horovod").decode().split()
    return horovod_env(hosts, rank, (host, int(port)))


def join_horovodrun() -> dict[str, str]:
    """Check that horovodrun can be reached over Gloo, and return the variables that a rank needs for its next world.

    For a process's first world, over MPI and under Horovod elastic this is {}. horovodrun's server keeps the first
    world's addresses, so rank 0 starts another server for each further world, and all ranks get its address. Raises
    UserError if horovodrun cannot be reached, since Horovod would abort the process.
    """
    number, horovodrun = next(joins), horovodrun_address(os.environ)
    if horovodrun is None:  # the ranks meet over MPI
        return {}
    try:
        socket.create_connection(horovodrun, gloo_timeout_s(os.environ)).close()
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach horovodrun at {horovodrun[0]}:{horovodrun[1]} ({error}). Start"
            " `horovodrun --gloo` on one of the hosts of the run, with --network-interfaces NAME. If its variables are"
            " left over from another job, unset HOROVOD_RANK and HOROVOD_SIZE."
        ) from None
    if number == 0 or is_elastic(os.environ):
        return {}
    from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore

    key = (*horovodrun, f"hvd_bert.{number}", "address")
    if os.environ["HOROVOD_RANK"] == "0":
        put_data_into_kvstore(*key, AddressServer(horovodrun[0]).address)
    while True:
        try:
            return _address_env(*read_data_from_kvstore(*key))
        except RuntimeError:  # not set yet: rank 0 may be busy with the program's work
            time.sleep(0.05)
