"""How ranks find each other, in one process: stores on the loopback, and Slurm's lists of hosts."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from by_variables import free_port
from refusals import refused

from hvd_bert.distributed import rendezvous, slurm
from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import CollectiveError

TORCHRUN = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TORCHRUN |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
LAUNCHER = Launcher("torchrun", 1, 0)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that the module sees."""
    variables = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(rendezvous, "os", SimpleNamespace(environ=variables))
    return variables


def listening(port: int) -> set[str]:
    """The addresses at which this process listens on a port."""
    found = psutil.Process().net_connections("tcp")
    return {socket.laddr.ip for socket in found if socket.laddr.port == port and socket.status == psutil.CONN_LISTEN}


def test_store_listens_at_its_address_only(environ):
    store = rendezvous.serve_store("127.0.0.1")
    assert listening(store.port) == {"127.0.0.1"}
    store.set("key", "value")
    reached = rendezvous.reach_store("127.0.0.1", store.port, 0)
    assert reached.get("key") == b"value"
    assert reached.timeout.total_seconds() == rendezvous.START_S, "a slower rank may still start"


def test_address_that_is_not_this_hosts(environ):
    with refused(socket.gethostname(), "192.0.2.77"):
        rendezvous.serve_store("192.0.2.77")


def test_ranks_that_do_not_start_are_named(environ, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.1)
    monkeypatch.setattr(rendezvous, "START_S", 0.2)
    environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "1"
    store = rendezvous.serve_store("127.0.0.1")
    store.set("hvd_bert.host.2", "another")
    with caplog.at_level(logging.INFO), refused("ranks 1, 3 of 4", "1 s"):
        rendezvous.exchange(store, 0, 4, "host", "")
    assert caplog.messages == ["Waiting for ranks 1, 3 of 4 to start"]


# --- torchrun and horovodrun -----------------------------------------------------------------------


def test_rank_0_serves_where_the_others_come_from(environ, monkeypatch):
    """At its own address; at all of them where MASTER_ADDR is a service's, or the loopback for the host's own name."""
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", resolving({"localhost": "127.0.0.1", "here": "127.0.1.1"}))
    own = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
    for name, address in (own | dict.fromkeys(["192.0.2.77", "service.invalid", "here"], "::")).items():
        store = rendezvous._master_store(0, name, free_port())
        assert listening(store.port) == {address}, name
        rendezvous.reach_store("127.0.0.1", store.port, 0)


def resolving(names: dict[str, str]) -> Any:
    """getaddrinfo with other names."""
    real = socket.getaddrinfo
    return lambda host, *arguments, **options: real(names.get(host, host), *arguments, **options)


def test_another_program_at_the_port(environ):
    environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as silent, refused(str(silent.getsockname()[1]), "1 s"):
        rendezvous.reach_store("127.0.0.1", silent.getsockname()[1], 0)


@pytest.mark.parametrize(("name", "value"), [("MASTER_PORT", "70000"), ("MASTER_ADDR", "a..b")])
def test_place_of_rank_0_that_cannot_be(environ, name, value):
    environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | {name: value})
    with refused(name, value):
        rendezvous.launcher_store(Launcher("torch's variables", 2, 1))


def test_rank_0_that_does_not_come_is_named(environ, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.1)
    monkeypatch.setattr(rendezvous, "START_S", 1)
    port = free_port()
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HOROVOD_GLOO_TIMEOUT_SECONDS="1")
    with refused(f"127.0.0.1:{port}", "MASTER_ADDR", "Rank 0"):
        rendezvous.launcher_store(Launcher("torch's variables", 2, 1))
    (message,) = caplog.messages
    assert f"rank 0 to serve at 127.0.0.1:{port}" in message


def test_next_world_of_a_process_has_other_keys(environ):
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    first, second = (rendezvous.launcher_store(Launcher("torch's variables", 2, 0)) for _ in range(2))
    first.set("key", "of the first")
    assert not second.check(["key"])


def test_ranks_of_worlds_of_different_sizes(environ):
    store = rendezvous.serve_store("127.0.0.1")
    store.set("hvd_bert.place.1", "3 pod-1 10.77.0.12")
    with refused("2 and 3"):
        rendezvous.meet(store, Launcher("torch's variables", 2, 0), "GLOO_SOCKET_IFNAME")


def test_launcher_that_is_gone_is_reported_at_once(environ):
    rendezvous.check_horovodrun()  # over MPI it serves nothing
    port = free_port()
    environ.update(TORCHRUN, MASTER_PORT=str(port))
    with refused(f"127.0.0.1:{port}", "TORCHELASTIC_RUN_ID"):
        rendezvous.launcher_store(LAUNCHER)
    environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))
    with refused(f"127.0.0.1:{port}"):
        rendezvous.check_horovodrun()


def test_under_torchrun_nothing_listens_on_all_interfaces(environ):
    served = rendezvous.serve_store("127.0.0.1")  # by the agent
    environ.update(TORCHRUN, MASTER_PORT=str(served.port))
    rendezvous.serve_horovod(LAUNCHER)
    assert environ["HOROVOD_GLOO_IFACE"] == "lo" and environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    assert listening(served.port) == listening(int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])) == {"127.0.0.1"}
    rendezvous.check_horovodrun()


def test_ranks_that_torchrun_restarts_have_other_keys(environ):
    served = rendezvous.serve_store("127.0.0.1")  # by the agent
    environ.update(TORCHRUN, MASTER_PORT=str(served.port))
    rendezvous._torchrun_store().set("key", "of the first start")
    environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert not rendezvous._torchrun_store().check(["key"])


# --- Slurm -----------------------------------------------------------------------------------------

SHOW_HOSTNAMES = '[ "$*" = "show hostnames a100-[01-02,07]" ] && printf "%s\\n" a100-01 a100-02 a100-07'


@pytest.mark.parametrize(
    ("script", "listed", "hosts"),
    [
        (SHOW_HOSTNAMES, "a100-[01-02,07]", ["a100-01", "a100-02", "a100-07"]),
        ("exit 1", "n1,n2", ["n1", "n2"]),
        ("exit 1", "gpu[1-2]", None),
    ],
)
def test_hosts_of_slurms_list(monkeypatch, tmp_path, script, listed, hosts):
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with nullcontext() if hosts else refused(listed, "torchrun"):
        assert slurm.expand_hosts(listed) == hosts


def test_steps_of_slurm_do_not_share_nodes_and_ports():
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n2"}
    assert slurm.step_nodes(step) == "n2"
    others = [step, step | {"SLURM_STEP_ID": "1"}, step | {"SLURM_JOB_ID": "18"}]
    assert len({slurm.step_port(other) for other in others}) == 3


def test_store_of_slurm_tasks_listens_towards_the_other_nodes(environ):
    port, nodes = free_port(), "name.invalid,localhost"
    environ.update(SLURMD_NODENAME="name.invalid")
    store = rendezvous._slurm_store(0, nodes, port)
    assert listening(port) == {"127.0.0.1"}
    store.set("key", "value")
    assert rendezvous._slurm_store(1, nodes, port).get("key") == b"value", "a rank of the same node"


def test_hosts_whose_names_do_not_resolve(environ, monkeypatch):
    """Each rank gives the address by which it reaches the store, and takes its interface from those of other hosts."""
    chosen: list[list[str]] = []
    monkeypatch.setattr(rendezvous, "choose_interface", lambda _, variable, others: chosen.append(others))
    store = rendezvous.serve_store("127.0.0.1")
    here, launcher = socket.gethostname(), Launcher("torchrun", 4, 1)
    for rank, place in {0: f"{here} 127.0.0.1", 2: "pod-2 10.77.0.12", 3: "pod-3 10.77.0.13"}.items():
        store.set(f"hvd_bert.place.{rank}", f"4 {place}")
        store.set(f"hvd_bert.interface.{rank}", "")
    assert rendezvous.meet(store, launcher, "GLOO_SOCKET_IFNAME") == [here, here, "pod-2", "pod-3"]
    store.set("hvd_bert.place.0", "4 pod-0 127.0.0.1")  # which itself reaches the store by the loopback
    rendezvous.meet(store, launcher, "GLOO_SOCKET_IFNAME")
    assert chosen == [["10.77.0.12", "10.77.0.13"], ["127.0.0.1", "10.77.0.12", "10.77.0.13"]]
    store.set("hvd_bert.interface.3", "pod-3 has no route. Set HVD_BERT_INTERFACE")
    with refused("rank 3", "pod-3", "HVD_BERT_INTERFACE", error=CollectiveError):  # on all ranks: none waits
        rendezvous.meet(store, launcher, "GLOO_SOCKET_IFNAME")


def test_places_of_ranks_on_uneven_hosts(environ, monkeypatch):
    store, checked, here = rendezvous.serve_store("127.0.0.1"), [], socket.gethostname()
    monkeypatch.setattr(rendezvous, "launcher_store", lambda launcher: store)
    monkeypatch.setattr(rendezvous, "check_own_name", lambda *address, **beyond: checked.append((*address, beyond)))
    environ["HOROVOD_GLOO_IFACE"] = "lo"
    for rank, place in enumerate((f"{here} 127.0.0.1", "another 10.77.0.12")):
        store.set(f"hvd_bert.place.{rank}", f"3 {place}")
        store.set(f"hvd_bert.interface.{rank}", "")
        store.set(f"hvd_bert.name.{rank}", "")
    store.set("hvd_bert.horovod", "127.0.0.1 29500")
    rendezvous.serve_horovod(Launcher("torchrun", 3, 2))
    assert checked == [("127.0.0.1", {"beyond_this_host": True})]
    places = {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    assert {name: environ[f"HOROVOD_{name}"] for name in places} == places
