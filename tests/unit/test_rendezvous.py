"""Rendezvous of ranks: stores on the loopback interface, choice of network interfaces, and Slurm's host lists."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from by_variables import free_port
from refusals import refused

from hvd_bert.distributed import horovod_rendezvous, interfaces, rendezvous, slurm
from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import CollectiveError

LAUNCHER = Launcher("torchrun", 1, 0)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace os.environ in both rendezvous modules by a dictionary that has only PATH. Returns the dictionary."""
    variables = {"PATH": os.environ["PATH"]}
    for module in (rendezvous, horovod_rendezvous):
        monkeypatch.setattr(module, "os", SimpleNamespace(environ=variables))
    return variables


def listening(port: int) -> set[str]:
    """Return the addresses at which this process listens on a port."""
    found = psutil.Process().net_connections("tcp")
    return {socket.laddr.ip for socket in found if socket.laddr.port == port and socket.status == psutil.CONN_LISTEN}


def test_store_listens_at_its_address_only(environ):
    store = rendezvous.serve_store("127.0.0.1")
    assert listening(store.port) == {"127.0.0.1"}
    store.set("key", "value")
    reached = rendezvous.reach_store("127.0.0.1", store.port, 0)
    assert reached.get("key") == b"value"
    assert reached.timeout.total_seconds() == rendezvous.START_S, "a slower rank may still start"


def test_ranks_that_do_not_start_are_named(environ, monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "NOTICE_S", 0.1)
    monkeypatch.setattr(rendezvous, "START_S", 0.2)
    environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "1"
    store = rendezvous.serve_store("127.0.0.1")
    store.set("hvd_bert.host.2", "another")
    with caplog.at_level(logging.INFO), refused("ranks 1, 3 of 4", "1 s"):
        rendezvous.exchange(store, 0, 4, "host", "")
    assert caplog.messages == ["Waiting for ranks 1, 3 of 4 to start"]


def test_rank_0_listens_where_the_other_ranks_connect(environ, monkeypatch):
    """Rank 0 listens at MASTER_ADDR, or at all addresses if MASTER_ADDR is not its own or resolves to 127.0.1.1."""
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", resolving({"localhost": "127.0.0.1", "here": "127.0.1.1"}))
    with refused(socket.gethostname(), "192.0.2.77"):
        rendezvous.serve_store("192.0.2.77")  # another host's address
    local = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
    for name, address in (local | dict.fromkeys(["192.0.2.77", "service.invalid", "here"], "::")).items():
        store = rendezvous._master_store(0, name, free_port())
        assert listening(store.port) == {address}, name
        rendezvous.reach_store("127.0.0.1", store.port, 0)


def resolving(names: dict[str, str]) -> Any:
    """Return a getaddrinfo that resolves each host of `names` as its value, and other hosts as usual."""
    real = socket.getaddrinfo
    return lambda host, *arguments, **options: real(names.get(host, host), *arguments, **options)


def test_another_program_at_the_port(environ):
    environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as silent, refused(str(silent.getsockname()[1]), "1 s"):
        rendezvous.reach_store("127.0.0.1", silent.getsockname()[1], 0)


@pytest.mark.parametrize(("name", "value"), [("MASTER_PORT", "70000"), ("MASTER_ADDR", "a..b")])
def test_impossible_address_of_rank_0(environ, name, value):
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


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (2, 3)])
def test_ranks_of_worlds_of_different_sizes(environ, rank, size):
    """Rank 0 of a smaller world may see only equal sizes, so the first rank of each size reports the mistake."""
    store = rendezvous.serve_store("127.0.0.1")
    for other in {0, 1, 2} - {rank}:
        store.set(f"hvd_bert.host.{other}", f"{5 - size} pod-{other} 10.77.0.12")
    with pytest.raises(CollectiveError, match="2 and 3") as raised:
        rendezvous.meet(store, Launcher("torch's variables", size, rank), "GLOO_SOCKET_IFNAME")
    assert raised.value.mine


def test_launcher_that_is_gone_is_reported_at_once(environ):
    assert horovod_rendezvous.join_horovodrun() == {}  # horovodrun over MPI has no server
    port = free_port()
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with refused(f"127.0.0.1:{port}", "TORCHELASTIC_RUN_ID"):
        rendezvous.launcher_store(LAUNCHER)
    environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))
    with refused(f"127.0.0.1:{port}"):
        horovod_rendezvous.join_horovodrun()


def test_under_torchrun_nothing_listens_on_all_interfaces(environ):
    served = rendezvous.serve_store("127.0.0.1")  # in place of torchrun's agent
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(served.port))
    found = horovod_rendezvous.serve_horovod(LAUNCHER)
    assert environ["HOROVOD_GLOO_IFACE"] == "lo" and found["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    assert listening(served.port) == listening(int(found["HOROVOD_GLOO_RENDEZVOUS_PORT"])) == {"127.0.0.1"}


def test_ranks_that_torchrun_restarts_have_other_keys(environ):
    served = rendezvous.serve_store("127.0.0.1")  # in place of torchrun's agent
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(served.port))
    rendezvous._torchrun_store().set("key", "of the first start")
    environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert not rendezvous._torchrun_store().check(["key"])


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


def test_host_without_an_interface_to_the_others_is_refused_on_all_ranks(environ):
    store = rendezvous.serve_store("127.0.0.1")
    store.set("hvd_bert.host.1", "2 pod-1 127.0.0.1")
    store.set("hvd_bert.problem.1", "pod-1 has no route. Set HVD_BERT_INTERFACE")
    with refused("rank 1", "pod-1", "HVD_BERT_INTERFACE", error=CollectiveError):
        rendezvous.meet(store, Launcher("torchrun", 2, 0), "GLOO_SOCKET_IFNAME")
    environ["HVD_BERT_INTERFACE"] = "ib7"
    with refused("rank 0", "HVD_BERT_INTERFACE=ib7", error=CollectiveError):
        rendezvous.meet(rendezvous.serve_store("127.0.0.1"), LAUNCHER, "GLOO_SOCKET_IFNAME")


def test_horovods_variables_on_uneven_hosts():
    ranks = [horovod_rendezvous.horovod_env(["a", "b", "a"], rank, ("10.1.0.7", 29500)) for rank in range(3)]
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"]
    found = [[env[f"HOROVOD_{name}"] for name in names] for env in ranks]
    assert found == [[*"030202", "a"], [*"130112", "b"], [*"231201", "a"]]
    assert (
        ranks[1]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.1.0.7" and ranks[1]["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "29500"
    )


ADDRESSES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.77.0.11", "fe80::1%eth0"], "ib0": ["192.168.4.11"], "down": []}


SETTINGS = {"ib0": "ib0", "10.77.0.0/16": "eth0", "192.168.4.1/24": "ib0", "fe80::/10": "eth0"}


def test_setting_goes_to_all_libraries(monkeypatch):
    monkeypatch.setattr(interfaces, "host_addresses", lambda: ADDRESSES)
    names = ["GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"]
    for setting, name in SETTINGS.items():
        environ = {"HVD_BERT_INTERFACE": setting, "HOROVOD_GLOO_IFACE": "the launcher's", "PATH": "/bin"}
        interfaces.apply_setting(environ)
        assert [environ[variable] for variable in names] == [name] * 4
    for setting in ("ib7", "10.78.0.0/16", "10.77.0.0/99"):
        with refused(f"HVD_BERT_INTERFACE={setting}", socket.gethostname(), "lo 127.0.0.1 ::1, eth0 10.77.0.11"):
            interfaces.apply_setting({"HVD_BERT_INTERFACE": setting})


def test_interface_towards_another_host_is_chosen(monkeypatch):
    assert (interfaces.interface_to("127.0.0.1"), interfaces.interface_to("256.0.0.1")) == ("lo", None)
    monkeypatch.setattr(interfaces, "interface_to", {"other": "ib0"}.get)
    for others, name in ((["unknown", "other"], "ib0"), ([], "lo")):
        environ: dict[str, str] = {}
        interfaces.choose_interface(environ, "GLOO_SOCKET_IFNAME", others)
        assert environ == {"GLOO_SOCKET_IFNAME": name}
    environ["GLOO_SOCKET_IFNAME"] = "eth7"  # the user's choice is kept
    interfaces.choose_interface(environ, "GLOO_SOCKET_IFNAME", ["other"])
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7"}
    with refused(socket.gethostname(), "unknown", "HVD_BERT_INTERFACE"):
        interfaces.choose_interface({}, "GLOO_SOCKET_IFNAME", ["unknown"])


def test_host_name_at_which_other_hosts_cannot_reach_gloo(monkeypatch):
    for name, beyond, named in (
        ("localhost", False, None),
        ("localhost", True, "127.0.0.1"),
        ("192.0.2.77", True, "10.1.0.7 192.0.2.77"),  # another host's address
    ):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        with refused(name, named, "/etc/hosts") if named else nullcontext():
            interfaces.check_own_name("10.1.0.7", beyond)


def test_host_without_loopback(monkeypatch):
    monkeypatch.setattr(interfaces, "host_addresses", lambda: {"lo": [], "eth0": ["10.77.0.11"]})
    with refused(socket.gethostname(), "ip link set lo up"):
        interfaces.choose_interface({}, "GLOO_SOCKET_IFNAME", [])


BRIDGES = ["docker0", "br-0123456789ab", "virbr0", "cni-podman0"]


@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI is not installed")
@pytest.mark.parametrize(
    ("inner", "environ", "site", "excluded"),
    [
        (BRIDGES, {}, "", f"127.0.0.1/8,sppp,{','.join(BRIDGES)}"),
        (["br0", "br-lan", "dockerless"], {}, "", None),  # may be the host's own network
        (["docker0"], {"OMPI_MCA_btl_tcp_if_include": "eth0"}, "", None),  # set by horovodrun
        (["docker0"], {}, "btl_tcp_if_include = eth0", None),
        (["docker0"], {}, None, None),  # without ompi_info, the parameters are unknown
    ],
)
def test_open_mpi_avoids_networks_of_containers(inner, environ, site, excluded, tmp_path, monkeypatch):
    """`site`: content of the user's Open MPI parameter file; None: ompi_info is not on PATH."""
    monkeypatch.setattr(interfaces, "host_addresses", lambda: {**ADDRESSES, **{name: ["172.17.0.1"] for name in inner}})
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"{site or ''}\n")
    if site is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    found = dict(environ)
    interfaces.avoid_inner_networks(found)
    name = "OMPI_MCA_btl_tcp_if_exclude"
    assert found == environ | ({name: excluded} if excluded else {})
