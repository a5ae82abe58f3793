"""Rendezvous of the ranks for torch.distributed and Horovod, from what each launcher provides.

What is served here listens only on the address through which the other ranks come, unless that is another's: a
service's in Kubernetes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not in its stubs

from hvd_bert.distributed.interfaces import (
    address_towards,
    apply_setting,
    check_own_name,
    choose_interface,
    interface_address,
    is_loopback,
    own_address_at,
)
from hvd_bert.distributed.launch import (
    Launcher,
    gloo_timeout_s,
    horovodrun_address,
    host_name,
    is_elastic,
    number,
)
from hvd_bert.distributed.launchers import AGENT, FIRST_NODE
from hvd_bert.distributed.logs import describe_ranks
from hvd_bert.distributed.slurm import expand_hosts, step_nodes, step_port
from hvd_bert.distributed.watchdog import answered
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import UserError, log

START_S = 300  # for ranks that start late; later the group's own timeout applies
MAX_PORT = 65535
NOTICE_S = 10  # seconds until missing ranks are named
SAME_ADDRESS = (
    "All hosts must resolve that host's name to the same address and accept connections from each other, and that rank"
    " must run."
)

_joins = count()  # a process may join several worlds, one after another


def program_group() -> Launcher | None:
    """The process group of torch.distributed that the program has initialized, with its store; None without one.

    It stays when a run ends. Call this once per join: the store has other keys each time.
    """
    if not distributed.is_initialized():
        return None
    rank, store = distributed.get_rank(), distributed.distributed_c10d._get_default_store()
    # Counted in the store: the processes of a group need not have joined equally many worlds before.
    joins = store.add(f"hvd_bert.joins.{rank}", 1)
    return Launcher("a process group", distributed.get_world_size(), rank, PrefixStore(f"hvd_bert/{joins}", store))


def serve_store(address: str | None, port: int = 0) -> Any:
    """A key-value store that this process serves at `address` only, a name or an IP address; port 0: at a free port.

    None: at all addresses. Raises UserError if it cannot.
    """
    both = address is None and socket.has_dualstack_ipv6()
    named = address or ("::" if both else "0.0.0.0")
    try:
        family, _, _, _, place = socket.getaddrinfo(named, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot serve the other ranks at {named}{f':{port}' if port else ''} ({error})."
            " The host's name must resolve to an address of its own, and neither another program nor another rank 0 may"
            " listen at the port."
        ) from None
    host, port = listener.getsockname()[:2]
    descriptor = listener.detach()  # the store closes it
    return _store(host if address else "localhost", port, is_master=True, master_listen_fd=descriptor)


def reach_store(host: str, port: int, patience_s: float, hint: str = SAME_ADDRESS) -> Any:
    """A key-value store that another process serves. Raises UserError if nothing answers there in `patience_s`."""
    start, noted = time.monotonic(), False
    while True:
        try:  # a TCPStore would print its stack
            socket.create_connection((host, port), gloo_timeout_s(os.environ)).close()
            return _store(host, port, hint)
        except OSError as error:
            waited_s = time.monotonic() - start
            if waited_s > patience_s:
                raise _unreachable(host, port, error, hint) from None
            if waited_s > NOTICE_S and not noted:
                noted = True
                log.warning("Waiting for rank 0 to serve at %s:%s (%s)", host, port, error)
        time.sleep(0.1)


def _store(host: str, port: int, hint: str = SAME_ADDRESS, **serving: Any) -> Any:
    patience_s = gloo_timeout_s(os.environ)
    options: dict[str, Any] = {"timeout": timedelta(seconds=patience_s), "wait_for_workers": False, **serving}
    try:  # a TCPStore waits forever for another program that listens there
        store = answered(lambda: TCPStore(host, port, **options), patience_s)
    except RuntimeError as error:
        raise _unreachable(host, port, error, hint) from None
    store.set_timeout(timedelta(seconds=_start_s()))
    return store


def _unreachable(host: str, port: int, error: Exception, hint: str) -> UserError:
    here, reason = socket.gethostname(), str(error).splitlines()[0]
    return UserError(f"{here} cannot reach the other ranks at {host}:{port} ({reason}). {hint}")


def _start_s() -> int:
    return max(START_S, gloo_timeout_s(os.environ))


def exchange(store: Any, rank: int, size: int, name: str, value: str) -> list[str]:
    """The value of every rank, once all have started. A collective. Raises CollectiveError if some do not start."""
    keys = [f"hvd_bert.{name}.{other}" for other in range(size)]

    def missing() -> str:
        return describe_ranks([other for other in range(size) if not store.check([keys[other]])])

    store.set(keys[rank], value)
    start, noted = time.monotonic(), False
    while not store.check(keys):  # store.wait would not let Ctrl-C through
        waited_s = time.monotonic() - start
        if waited_s > _start_s():
            reporter = next(other for other in range(size) if store.check([keys[other]]))
            raise CollectiveError(
                f"{missing()} of {size} did not start in {_start_s()} s. See the reason above. If none is there, the"
                " launcher's variables may be left over from another job: unset them.",
                mine=rank == reporter,
            )
        if waited_s > NOTICE_S and not noted:
            noted = True
            log.info("Waiting for %s of %s to start", missing(), size)
        time.sleep(0.05)
    return [store.get(key).decode() for key in keys]


def meet(store: Any, launcher: Launcher, variable: str) -> list[str]:
    """The host of every rank, once all have started. Sets a library's variable to the interface towards other hosts.

    The hosts' names need not resolve: each rank gives the address through which it reaches the store. Raises
    CollectiveError on all ranks if some do not start, or one has no such interface.
    """
    rank, size, here, server = launcher.rank or 0, launcher.size or 1, socket.gethostname(), _store_host(store)
    places = exchange(store, rank, size, "place", f"{size} {here} {address_towards(server) or ''}")
    sizes, hosts, addresses = zip(*(place.split(" ") for place in places), strict=True)
    if len(set(sizes)) > 1:
        raise UserError(f"The ranks were started for worlds of {' and '.join(sorted(set(sizes)))}. Give all one size.")
    # Rank 0 may reach the store by the loopback: the others know a better address of it.
    others = [server] if hosts[0] != here else []
    others += [address for host, address in zip(hosts[1:], addresses[1:], strict=True) if host != here and address]
    with _raise_on_all_ranks(store, rank, size, "interface"):
        apply_setting(os.environ)
        choose_interface(os.environ, variable, others)
    return list(hosts)


@contextmanager
def _raise_on_all_ranks(store: Any, rank: int, size: int, name: str) -> Iterator[None]:
    """Turn a UserError of one rank inside into a CollectiveError on all ranks. `name`: of what is done inside."""
    problem = ""
    try:
        yield
    except UserError as error:
        problem = str(error)
    for other, text in enumerate(exchange(store, rank, size, name, problem)):
        if text:
            raise CollectiveError(f"rank {other}: {text}", mine=rank == other)


def _store_host(store: Any) -> str:
    """Where the store is served; for a file's, that a program's group may have, the host of this process."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", None) or socket.gethostname())


def world_store(world: World, address: str) -> Any:
    """A key-value store for a world's ranks, which rank 0 serves at its `address` and a free port.

    Raises CollectiveError on all ranks if one of them cannot reach it.
    """
    store = None
    with world.raise_on_all_ranks():
        if world.rank == 0:
            store = serve_store(address)
    host, port = world.broadcast((store and store.host, store and store.port))
    with world.raise_on_all_ranks():
        return store or reach_store(host, port, gloo_timeout_s(os.environ))


@cache
def _slurm_store(rank: int, nodes: str, port: int) -> Any:
    """A key-value store for the tasks of a Slurm step, which rank 0 serves on the first of the step's `nodes`."""
    first, *others = expand_hosts(nodes)
    if others and os.environ.get("SLURMD_NODENAME", socket.gethostname()) == first:
        # A host may resolve its own name to the loopback, where other hosts do not reach it.
        first = address_towards(others[0]) or first
    return serve_store(first, port) if rank == 0 else reach_store(first, port, _start_s())


def launcher_store(launcher: Launcher) -> Any:
    """A key-value store for the ranks of a launcher that has one. Raises UserError if it is not reached.

    Rank 0 serves it to the end of its process, except under torchrun and in a group: a slower rank may still use it.
    """
    rank = launcher.rank or 0
    if launcher.store:
        return launcher.store
    if launcher.row.store == AGENT:
        store = _torchrun_store()
    elif launcher.row.store == FIRST_NODE:
        store = _slurm_store(rank, step_nodes(os.environ), step_port(os.environ))
    else:
        store = _master_store(rank, *_master())
    return PrefixStore(str(next(_joins)), store)  # separates the keys of successive worlds in this process


def _torchrun_store() -> Any:
    """The key-value store of torchrun's agent, with other keys after each restart. Raises UserError if it is gone."""
    host, port = _master()
    hint = "Start with torchrun. If its variables are left over from another job, unset TORCHELASTIC_RUN_ID."
    store = reach_store(host, port, 0, hint)  # the agent serves before it starts ranks
    return PrefixStore(f"hvd_bert/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@cache
def _master_store(rank: int, host: str, port: int) -> Any:
    """A key-value store that rank 0 serves at MASTER_ADDR and MASTER_PORT, as torch's env:// rendezvous does."""
    if rank == 0:
        return serve_store(host if _is_own(host) else None, port)
    hint = f"Rank 0 must serve at MASTER_ADDR={host}, MASTER_PORT={port}, and no other program: set both for all ranks."
    return reach_store(host, port, _start_s(), hint)


def _is_own(host: str) -> bool:
    """Whether the other ranks reach this host at the address that `host` has here.

    Not if it is the address of a service (Kubernetes), or the loopback as which many hosts resolve their own name.
    """
    address = own_address_at(host)
    return address is not None and (host in ("localhost", address) or not is_loopback(address))


def _master() -> tuple[str, int]:
    host, port = os.environ["MASTER_ADDR"], number(os.environ, "MASTER_PORT", 1) or 0
    if port > MAX_PORT:
        raise UserError(f"MASTER_PORT={port}: must be at most {MAX_PORT}. Set another, the same for all ranks.")
    return host_name(host, "MASTER_ADDR"), port


def check_horovodrun() -> None:
    """Raise UserError if this is a rank of horovodrun over Gloo and does not reach horovodrun: Horovod would abort."""
    address = horovodrun_address(os.environ)
    if address is None:  # MPI
        return
    try:
        socket.create_connection(address, gloo_timeout_s(os.environ)).close()
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach horovodrun at {address[0]}:{address[1]} ({error}). Start `horovodrun"
            " --gloo` on one of the hosts of the run, with --network-interfaces NAME. If its variables are left over"
            " from another job, unset HOROVOD_RANK and HOROVOD_SIZE."
        ) from None


def serve_again() -> None:
    """Replace horovodrun's store, in which a process finds the addresses of its last world, by another one's."""
    number, address = next(_joins), horovodrun_address(os.environ)
    if not number or address is None or is_elastic(os.environ):
        return
    from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore

    place = (*address, f"hvd_bert.{number}", "address")
    if os.environ["HOROVOD_RANK"] == "0":
        put_data_into_kvstore(*place, _serve_addresses(address[0]))
    while True:
        try:
            return _set_address(*read_data_from_kvstore(*place))
        except RuntimeError:  # rank 0 may be busy with work of the program's own
            time.sleep(0.05)


def _serve_addresses(otherwise: str) -> tuple[str, int]:
    """Serve Horovod's ranks to the end of this process, at the chosen interface or `otherwise`."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    own = interface_address(os.environ.get("HOROVOD_GLOO_IFACE")) or otherwise
    server = RendezvousHTTPServer((own, 0), RendezvousHandler, verbose=0)  # RendezvousServer listens everywhere
    server.init([])  # it needs no list of ranks
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return own, server.server_port


def _set_address(address: str, port: int | str) -> None:
    os.environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR=address, HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))


def serve_horovod(launcher: Launcher) -> None:
    """Set what horovodrun --gloo would set, for a rank that has a `launcher_store`: its place, and where to rendezvous.

    Rank 0 serves the addresses of the ranks until its process ends.
    """
    rank = launcher.rank or 0
    store = launcher_store(launcher)
    hosts = meet(store, launcher, "HOROVOD_GLOO_IFACE")
    with _raise_on_all_ranks(store, rank, len(hosts), "name"):
        check_own_name(interface_address(os.environ["HOROVOD_GLOO_IFACE"]), beyond_this_host=len(set(hosts)) > 1)
    if rank == 0:
        own, its_port = _serve_addresses(address_towards(_store_host(store)) or "127.0.0.1")
        store.set("hvd_bert.horovod", f"{own} {its_port}")
    address, port = store.get("hvd_bert.horovod").decode().split()
    local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    across = [host for host in dict.fromkeys(hosts) if hosts.count(host) > local_rank]  # the hosts with this local rank
    places = {"RANK": rank, "SIZE": len(hosts), "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    places |= {"CROSS_RANK": across.index(hosts[rank]), "CROSS_SIZE": len(across)}
    os.environ.update({f"HOROVOD_{name}": str(number) for name, number in places.items()})
    os.environ.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_HOSTNAME=socket.gethostname())
    _set_address(address, port)
