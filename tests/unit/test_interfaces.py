"""The network interface of a host, by a setting or by its route to other hosts."""

from __future__ import annotations

import shutil
import socket
from contextlib import nullcontext

import pytest
from refusals import refused

from hvd_bert.distributed import interfaces
from hvd_bert.errors import UserError

ADDRESSES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.77.0.11", "fe80::1%eth0"], "ib0": ["192.168.4.11"], "down": []}


def test_interface_by_setting():
    for setting, name in (("ib0", "ib0"), ("10.77.0.0/16", "eth0"), ("192.168.4.1/24", "ib0"), ("fe80::/10", "eth0")):
        assert interfaces.resolve(setting, ADDRESSES) == name
    for setting, named in (("10.78.0.0/16", "available: lo 127.0.0.1 ::1, eth0 "), ("10.77.0.0/99", "not a subnet")):
        with pytest.raises(UserError, match=named):
            interfaces.resolve(setting, ADDRESSES)


def test_setting_goes_to_all_libraries(monkeypatch):
    monkeypatch.setattr(interfaces, "host_addresses", lambda: ADDRESSES)
    environ = {"HVD_BERT_INTERFACE": "10.77.0.0/16", "HOROVOD_GLOO_IFACE": "the launcher's", "PATH": "/bin"}
    interfaces.apply_setting(environ)
    names = ["GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"]
    assert [environ[name] for name in names] == ["eth0"] * 4
    with refused("HVD_BERT_INTERFACE=ib7", socket.gethostname(), "available: lo, eth0, ib0, down"):
        interfaces.apply_setting({"HVD_BERT_INTERFACE": "ib7"})


def test_interface_is_the_one_towards_another_host(monkeypatch):
    monkeypatch.setattr(interfaces, "interface_to", {"other": "ib0"}.get)
    for others, name in ((["unknown", "other"], "ib0"), ([], "lo")):
        environ: dict[str, str] = {}
        interfaces.choose_interface(environ, "GLOO_SOCKET_IFNAME", others)
        assert environ == {"GLOO_SOCKET_IFNAME": name}
    environ["GLOO_SOCKET_IFNAME"] = "eth7"  # keeps the user's choice
    interfaces.choose_interface(environ, "GLOO_SOCKET_IFNAME", ["other"])
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7"}
    with refused(socket.gethostname(), "unknown", "HVD_BERT_INTERFACE"):
        interfaces.choose_interface({}, "GLOO_SOCKET_IFNAME", ["unknown"])


def test_own_name_at_which_gloo_would_listen(monkeypatch):
    for name, beyond, named in (
        ("localhost", False, None),
        ("localhost", True, "127.0.0.1"),
        ("192.0.2.77", True, "10.1.0.7 192.0.2.77"),  # of another host
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
        (["br0", "br-lan", "dockerless"], {}, "", None),  # perhaps the host's own network
        (["docker0"], {"OMPI_MCA_btl_tcp_if_include": "eth0"}, "", None),  # horovodrun's
        (["docker0"], {}, "btl_tcp_if_include = eth0", None),
    ],
)
def test_open_mpi_avoids_networks_of_containers(inner, environ, site, excluded, tmp_path, monkeypatch):
    """With the parameters that a user's file gives to Open MPI."""
    monkeypatch.setattr(interfaces, "host_addresses", lambda: {**ADDRESSES, **{name: ["172.17.0.1"] for name in inner}})
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"{site}\n")
    found = dict(environ)
    interfaces.avoid_inner_networks(found)
    name = "OMPI_MCA_btl_tcp_if_exclude"
    assert found == environ | ({name: excluded} if excluded else {})
