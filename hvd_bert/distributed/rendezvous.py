"""Rendezvous of the ranks in a key-value store. The launcher determines which process serves the store.

The server listens only at the address that the other ranks use. If MASTER_ADDR does not resolve to such an address on
rank 0's host, for example because it names a Kubernetes service, the server listens at all addresses.
"""

from __future__ import annotations

import os
import socket
import time
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
    host_name,
    number,
)
from hvd_bert.distributed.launchers import AGENT, FIRST_NODE
from hvd_bert.distributed.logs import describe_ranks
from hvd_bert.distributed.slurm import expand_hosts, step_nodes, step_port
from hvd_bert.distributed.watchdog import answered
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import UserError, log

START_S = 300  # seconds to wait until all ranks have started; then the process group's timeout applies
MAX_PORT = 65535
NOTICE_S = 10  # seconds until missing ranks are logged
SAME_ADDRESS = (
    "All hosts must resolve that host's name to the same address and accept connections from each other, and that rank"
    " must run."
)

joins = count()  # numbers the successive worlds that this process joins


def program_group() -> Launcher | None:
    """Describe the program's torch.distributed process group as a Launcher; None if the program has initialized none.

    A run does not destroy this group. Call this once per join, since each call gives the store a new key prefix.
    """
    if not distributed.is_initialized():
        return None
    rank, store = distributed.get_rank(), distributed.distributed_c10d._get_default_store()
    # Counted in the store, not by `joins`: a group's processes may have joined different numbers of worlds.
    join = store.add(f"hvd_bert.joins.{rank}", 1)
    return Launcher("a process group", distributed.get_world_size(), rank, PrefixStore(f"hvd_bert/{join}", store))


def serve_store(address: str | None, port: int = 0) -> Any:
    """Serve a key-value store at `address`, a host name or an IP address, and return it.

    If `address` is None, listen at all addresses; if `port` is 0, choose a free port. Raises UserError if this host
    cannot listen there.
    """
    both = address is None and socket.has_dualstack_ipv6()
    named = address or ("::" if both else "0.0.0.0")
    try:
        family, *_, found = socket.getaddrinfo(named, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(found[:2], family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=both)
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
    """Connect to another process's key-value store. `hint`: the advice at the end of the error message.

    Raises CollectiveError if the store does not answer in `patience_s` seconds.
    """
    start, noted = time.monotonic(), False
    while True:
        try:  # TCPStore would print a stack trace on failure
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
    try:  # TCPStore waits forever if another program listens there
        store = answered(lambda: TCPStore(host, port, **options), patience_s)
    except RuntimeError as error:
        raise _unreachable(host, port, error, hint) from None
    store.set_timeout(timedelta(seconds=_start_s()))
    return store


def _unreachable(host: str, port: int, error: Exception, hint: str) -> CollectiveError:
    """Return an error that this rank reports, since rank 0 cannot detect it."""
    here, reason = socket.gethostname(), str(error).splitlines()[0]
    return CollectiveError(f"{here} cannot reach the other ranks at {host}:{port} ({reason}). {hint}", mine=True)


def _start_s() -> int:
    return max(START_S, gloo_timeout_s(os.environ))


def exchange(store: Any, rank: int, size: int, name: str, value: str) -> list[str]:
    """Return every rank's `value`, in rank order. Raises CollectiveError if some ranks do not start in time.

    `name`: part of the values' keys. Each exchange in a store must have a different name.
    """
    keys = [f"hvd_bert.{name}.{other}" for other in range(size)]

    def missing() -> str:
        return describe_ranks([other for other in range(size) if not store.check([keys[other]])])

    store.set(keys[rank], value)
    start, noted = time.monotonic(), False
    while not store.check(keys):  # store.wait would block Ctrl-C
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
    """Return the host of each rank, and set a library's `variable` to this host's interface towards the other hosts.

    Host names need not resolve, since each rank shares the address through which it reaches the store. Raises
    CollectiveError if a rank does not start, has a different world size, has no such interface, or cannot listen with
    Horovod's Gloo.
    """
    rank, size, here, server = launcher.rank or 0, launcher.size or 1, socket.gethostname(), store_host(store)
    described = exchange(store, rank, size, "host", f"{size} {here} {address_towards(server) or ''}")
    sizes, hosts, addresses = zip(*(text.split(" ") for text in described), strict=True)
    if len(set(sizes)) > 1:
        wrong = f"The ranks were started for worlds of {' and '.join(sorted(set(sizes)))}. Give all one size."
        raise CollectiveError(wrong, mine=sizes.index(str(size)) == rank)  # the first rank of each size reports it
    # Rank 0's own address may be the loopback, so the others use the address at which they reach the store.
    others = [server] if hosts[0] != here else []
    others += [address for host, address in zip(hosts[1:], addresses[1:], strict=True) if host != here and address]
    problem = ""
    try:
        apply_setting(os.environ)
        choose_interface(os.environ, variable, others)
        if variable == "HOROVOD_GLOO_IFACE":
            check_own_name(interface_address(os.environ[variable]), beyond_this_host=len(set(hosts)) > 1)
    except UserError as error:
        problem = str(error)
    for other, text in enumerate(exchange(store, rank, size, "problem", problem)):
        if text:
            raise CollectiveError(f"rank {other}: {text}", mine=rank == other)
    return list(hosts)


def store_host(store: Any) -> str:
    """Return the host that serves a store. For a FileStore, which a program's group may have, return this host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", None) or socket.gethostname())


def world_store(world: World, variable: str) -> Any:
    """Return a key-value store for a world's ranks. Rank 0 serves it at a free port of the interface in `variable`.

    If `variable` is not set, rank 0 uses its address on the route to another host. Raises CollectiveError on all ranks
    if one of them cannot reach the store.
    """
    others = [host for host in world.allgather(world.host) if host != world.host]
    store = None
    with world.raise_on_all_ranks():
        if world.rank == 0:
            # A host may resolve its own name to the loopback, which other hosts cannot reach.
            towards = address_towards(others[0]) if others else None
            store = serve_store(interface_address(os.environ.get(variable)) or towards or world.host)
    host, port = world.broadcast((store and store.host, store and store.port))
    with world.raise_on_all_ranks():
        return store or reach_store(host, port, gloo_timeout_s(os.environ))


@cache
def _slurm_store(rank: int, nodes: str, port: int) -> Any:
    """Return a key-value store for the tasks of a Slurm step. Rank 0 serves it on the first of the step's `nodes`."""
    first, *others = expand_hosts(nodes)
    if others and os.environ.get("SLURMD_NODENAME", socket.gethostname()) == first:
        # A host may resolve its own name to the loopback, which other hosts cannot reach.
        first = address_towards(others[0]) or first
    return serve_store(first, port) if rank == 0 else reach_store(first, port, _start_s())


def launcher_store(launcher: Launcher) -> Any:
    """Return the key-value store of a launcher's ranks. Raises UserError if this rank cannot reach or serve it.

    Torchrun and programs with a process group provide their own store. Otherwise rank 0 serves it until its process
    ends, since a slower rank may still use it.
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
    return PrefixStore(str(next(joins)), store)  # a new key prefix for each world of this process


def _torchrun_store() -> Any:
    """Return the key-value store of torchrun's agent, with a new key prefix after each restart of the ranks."""
    host, port = _master()
    hint = "Start with torchrun. If its variables are left over from another job, unset TORCHELASTIC_RUN_ID."
    store = reach_store(host, port, 0, hint)  # no patience: the agent serves before it starts ranks
    return PrefixStore(f"hvd_bert/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@cache
def _master_store(rank: int, host: str, port: int) -> Any:
    """Return the key-value store at MASTER_ADDR and MASTER_PORT. Rank 0 serves it, as in torch's env:// rendezvous."""
    if rank == 0:
        return serve_store(host if _is_own(host) else None, port)
    hint = f"Rank 0 must serve at MASTER_ADDR={host}, MASTER_PORT={port}, and no other program: set both for all ranks."
    return reach_store(host, port, _start_s(), hint)


def _is_own(host: str) -> bool:
    """Return whether the other ranks can reach this host at the address to which `host` resolves here.

    They cannot if it is a Kubernetes service's address, or the loopback, to which many hosts resolve their own name. If
    `host` itself is "localhost" or a loopback address, all ranks are on this host and can reach it.
    """
    address = own_address_at(host)
    return address is not None and (host in ("localhost", address) or not is_loopback(address))


def _master() -> tuple[str, int]:
    host, port = os.environ["MASTER_ADDR"], number(os.environ, "MASTER_PORT", 1) or 0
    if port > MAX_PORT:
        raise UserError(f"MASTER_PORT={port}: must be at most {MAX_PORT}. Set another, the same for all ranks.")
    return host_name(host, "MASTER_ADDR"), port
