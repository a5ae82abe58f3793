"""Which network interface the ranks of this host use."""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress

import psutil

from hvd_bert.errors import UserError

SETTING = "HVD_BERT_INTERFACE"
# From these torch's Gloo, Horovod's Gloo, NCCL and Open MPI read the name of the interface.
VARIABLES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")

TCP_INTERFACES = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")  # Open MPI accepts only one of them
OMPI_EXCLUDES = "127.0.0.1/8,sppp"  # Open MPI's default
# Networks of containers and virtual machines: Docker's, Podman's, libvirt's, LXC's, those of Kubernetes.
_INNER = re.compile(
    r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|podman\d+|virbr\d+|lxcbr\d+|lxdbr\d+|cni\S*|flannel\S*|cali\S*"
)


def apply_setting(environ: MutableMapping[str, str]) -> None:
    """Have all libraries use this host's interface of HVD_BERT_INTERFACE. Call before they start.

    It replaces what horovodrun sets, which is one name for all hosts.
    """
    setting = environ.get(SETTING)
    if not setting:
        return
    try:
        name = resolve(setting, host_addresses())
    except UserError as error:
        raise UserError(f"{SETTING}={setting} on {socket.gethostname()}: {error}") from None
    environ.update(dict.fromkeys(VARIABLES, name))


def resolve(setting: str, addresses: Mapping[str, Sequence[str]]) -> str:
    """The interface of a host by a setting: its name, or a subnet such as 10.1.0.0/16.

    `addresses`: those of each of the host's interfaces. Raises UserError if the host has none that fits.
    """
    if "/" in setting:
        try:
            subnet = ipaddress.ip_network(setting, strict=False)
        except ValueError as error:
            raise UserError(f"not a subnet ({error}); for example 10.1.0.0/16") from None
        fitting = [
            name for name, own in addresses.items() for one in own if ipaddress.ip_address(one.split("%")[0]) in subnet
        ]
        if not fitting:
            listed = ", ".join(f"{name} {' '.join(own)}" for name, own in addresses.items())
            raise UserError(f"no interface in this subnet; available: {listed}")
        return fitting[0]
    if setting not in addresses:
        raise UserError(f"no such interface; available: {', '.join(addresses)}")
    return setting


def interface_named(environ: Mapping[str, str], controller: str) -> str:
    """The interfaces that are named for Horovod's ranks on this host, which have joined; "" if they use all."""
    return environ.get(TCP_INTERFACES[0] if controller == "mpi" else "HOROVOD_GLOO_IFACE", "")


def choose_interface(environ: MutableMapping[str, str], variable: str, others: Sequence[str]) -> None:
    """Set a library's variable to the interface through which this host reaches the world's other hosts.

    Keeps what is set. Gloo's default is the interface of the host's own name, which on many systems is the loopback.
    `others`: names or addresses of other hosts; the first that can be resolved counts. Raises UserError if none can, or
    without any if the loopback is down.
    """
    if environ.get(variable):
        return
    name = next((name for other in others if (name := interface_to(other))), None) if others else loopback()
    if name is None:
        raise UserError(
            f"{socket.gethostname()} has no route to {', '.join(dict.fromkeys(others))}, and so the interface towards"
            f" the other ranks is unknown. Set {SETTING} to its name or its subnet (docs/guides/cluster.md)."
        )
    environ[variable] = name


def avoid_inner_networks(environ: MutableMapping[str, str]) -> None:
    """Keep Open MPI off this host's networks of containers. Keeps what the user or the site has set. Call before MPI.

    Docker's bridge has the same address on all hosts: Open MPI would connect a rank to its own host, and wait forever.
    """
    addresses = host_addresses()
    inner = [name for name in addresses if _INNER.fullmatch(name)]
    others = [name for name in addresses if name not in (*inner, "lo")]
    is_set = any(name in environ for name in TCP_INTERFACES)
    if inner and others and not is_set and not _is_set_by_site():
        environ[TCP_INTERFACES[1]] = ",".join([OMPI_EXCLUDES, *inner])


def _is_set_by_site() -> bool:
    """Whether a file of Open MPI's parameters (openmpi-mca-params.conf) names interfaces, or that is unknown."""
    command = ["ompi_info", "--parsable", "--param", "btl", "tcp", "--level", "9"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return True
    return len(re.findall(r":btl_tcp_if_(?:in|ex)clude:source:default", shown)) != len(TCP_INTERFACES)


def interface_address(interface: str | None) -> str | None:
    """An IPv4 address of a network interface of this host; None if it has none."""
    addresses = psutil.net_if_addrs().get(interface or "", [])
    return next((str(address.address) for address in addresses if address.family == socket.AF_INET), None)


def check_own_name(address: str | None, beyond_this_host: bool) -> None:
    """Raise UserError unless this host's own name leads to one of its addresses, which other hosts can reach.

    Horovod 0.28's Gloo listens there whatever HOROVOD_GLOO_IFACE names (GlooContext::InitializeForProcessSet), and ends
    the process if it cannot. `address`: the one that the name should lead to; None: the loopback's.
    """
    name = socket.gethostname()
    found = own_address_at(name)
    if found is not None and not (beyond_this_host and is_loopback(found)):
        return
    address = address or host_addresses()[loopback()][0]
    wrong = f"leads to {found}, which other hosts cannot reach" if found else "does not lead to an address of this host"
    raise UserError(
        f"The name {name} {wrong}. Horovod's Gloo listens there, whatever the interface. Set the address in /etc/hosts"
        f" (`{address} {name}`), or use MPI (`horovodrun --mpi`) or, in one process, --strategy none."
    )


def loopback() -> str:
    """This host's loopback interface. Raises UserError if it is down."""
    addresses = host_addresses()
    found = next((name for name, own in addresses.items() if any(map(is_loopback, own))), None)
    if found is None:
        raise UserError(
            f"{socket.gethostname()} has no loopback address (127.0.0.1, ::1), through which processes of one host"
            " communicate. Start the interface (`ip link set lo up`), or use --strategy none."
        )
    return found


def is_loopback(address: str) -> bool:
    """Whether an IP address leads to this host only."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def own_address_at(name: str) -> str | None:
    """The address of this host to which its name leads, chosen as Gloo does; None if there is none."""
    try:
        found = [str(place[0]) for *_, place in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # no resolver accepts some names
        return None
    own = {address.split("%")[0] for addresses in host_addresses().values() for address in addresses}
    if "127.0.0.1" in own:  # and all of 127.0.0.0/8
        own |= {address for address in found if address.startswith("127.")}
    return next((address for address in found if address.split("%")[0] in own), None)


def address_towards(host: str) -> str | None:
    """The address under which this host reaches `host`, IPv4 where there is one; None if unknown."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, place in sorted(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # sends no packet, only chooses the route
                return str(probe.getsockname()[0])
    return None


def interface_to(host: str) -> str | None:
    """The network interface through which this host reaches `host`; None if unknown."""
    mine = address_towards(host)
    return next((name for name, own in host_addresses().items() if mine in own), None)


def host_addresses() -> dict[str, list[str]]:
    """This host's interfaces, with their IP addresses."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [str(address.address) for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
