"""Rendezvous of Horovod's ranks over Gloo: the server and the variables of horovodrun, also for other launchers."""

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
    """Serves the addresses of Horovod's ranks to the end of this process, as horovodrun does, but at one address only.

    `otherwise`: where to serve if no interface is chosen. `address`: host and port of the server.
    """

    def __init__(self, otherwise: str) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        host = interface_address(os.environ.get("HOROVOD_GLOO_IFACE")) or otherwise
        server = RendezvousHTTPServer((host, 0), RendezvousHandler, verbose=0)  # RendezvousServer listens everywhere
        server.init([])  # it needs no list of ranks
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.address = (host, int(server.server_port))


def horovod_env(hosts: Sequence[str], rank: int, address: tuple[str, int]) -> dict[str, str]:
    """The variables that horovodrun --gloo sets for a rank. `hosts`: one per rank. `address`: the server's."""
    local_rank = hosts[:rank].count(hosts[rank])
    across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]  # the hosts with this local rank
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
    """The variables of horovodrun for a rank of another launcher, which has a store. Rank 0 starts the server."""
    rank, store = launcher.rank or 0, launcher_store(launcher)
    hosts = meet(store, launcher, "HOROVOD_GLOO_IFACE")
    if rank == 0:
        server = AddressServer(address_towards(store_host(store)) or "127.0.0.1")
        store.set("hvd_bert.horovod", " ".join(map(str, server.address)))
    host, port = store.get("hvd_bert.horovod").decode().split()
    return horovod_env(hosts, rank, (host, int(port)))


def join_horovodrun() -> dict[str, str]:
    """Prepare a rank of horovodrun to rendezvous. Raises UserError if it cannot reach horovodrun: Horovod would abort.

    Returns the variables of another server for each further world of this process, {} for its first world: horovodrun's
    server still has the addresses of the first world.
    """
    number, horovodrun = next(joins), horovodrun_address(os.environ)
    if horovodrun is None:  # MPI
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
        except RuntimeError:  # rank 0 may be busy with work of the program's own
            time.sleep(0.05)
