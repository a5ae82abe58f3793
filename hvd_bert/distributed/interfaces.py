"""Choose the network interface through which the ranks of this host communicate."""

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
# Variables for the interface's name: of torch's Gloo, Horovod's Gloo, NCCL and Open MPI
VARIABLES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
TCP_INTERFACES = ("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_btl_tcp_if_exclude")  # Open MPI accepts only one of them
OMPI_EXCLUDES = "127.0.0.1/8,sppp"  # Open MPI's default
# Interface names of container and virtual-machine networks: Docker, Podman, libvirt, LXC, Kubernetes
_INNER = re.compile(
    r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|podman\d+|virbr\d+|lxcbr\d+|lxdbr\d+|cni\S*|flannel\S*|cali\S*"
)


def apply_setting(environ: MutableMapping[str, str]) -> None:
    """Set VARIABLES to the interface that HVD_BERT_INTERFACE selects on this host. Call before the libraries start.

    Overrides horovodrun's setting, which is one name for all hosts. Raises UserError if no interface matches.
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
    """Return the interface that `setting` selects by its name or by a subnet, such as 10.1.0.0/16.

    `addresses`: each interface's addresses. Raises UserError if no interface matches.
    """
    if setting in addresses:
        return setting
    with suppress(ValueError):  # `setting` is not a subnet either
        subnet = ipaddress.ip_network(setting, strict=False)
        for name, own in addresses.items():
            if any(ipaddress.ip_address(address) in subnet for address in own):
                return name
    listed = ", ".join(f"{name} {' '.join(own)}".strip() for name, own in addresses.items())
    raise UserError(f"no interface of this name or subnet (such as ib0 or 10.1.0.0/16); available: {listed}")


def interface_named(environ: Mapping[str, str], controller: str) -> str:
    """Return the interfaces set for Horovod's ranks on this host; "" means the default. Call after joining."""
    return environ.get(TCP_INTERFACES[0] if controller == "mpi" else "HOROVOD_GLOO_IFACE", "")


def choose_interface(environ: MutableMapping[str, str], variable: str, others: Sequence[str]) -> None:
    """Set a library's variable, unless it is set, to the interface through which this host reaches other hosts.

    Gloo's default is the interface to which the host's own name resolves, on many systems the loopback. `others`: names
    or addresses of other hosts, tried in order until one has a route; if empty, the loopback is set. Raises UserError
    if no host has a route, or if there is no loopback.
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
    """Exclude this host's container networks from Open MPI, unless the user or the site has set interfaces.

    Call before MPI starts. Docker's bridge has the same address on all hosts, so Open MPI would connect a rank to its
    own host and wait forever.
    """
    addresses = host_addresses()
    inner = [name for name in addresses if _INNER.fullmatch(name)]
    others = [name for name in addresses if name not in (*inner, "lo")]
    is_set = any(name in environ for name in TCP_INTERFACES)
    if inner and others and not is_set and not _is_set_by_site():
        environ[TCP_INTERFACES[1]] = ",".join([OMPI_EXCLUDES, *inner])


def _is_set_by_site() -> bool:
    """Return whether Open MPI's parameter files (openmpi-mca-params.conf) set interfaces. True if unknown."""
    command = ["ompi_info", "--parsable", "--param", "btl", "tcp", "--level", "9"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return True
    return len(re.findall(r":btl_tcp_if_(?:in|ex)clude:source:default", shown)) != len(TCP_INTERFACES)


def interface_address(interface: str | None) -> str | None:
    """Return the first IPv4 address of an interface of this host; None if it has none or does not exist."""
    addresses = psutil.net_if_addrs().get(interface or "", [])
    return next((str(address.address) for address in addresses if address.family == socket.AF_INET), None)


def check_own_name(address: str | None, beyond_this_host: bool) -> None:
    """Raise UserError unless this host's own name resolves to one of its addresses that all ranks can reach.

    Horovod 0.28's Gloo listens at that address, regardless of HOROVOD_GLOO_IFACE
    (GlooContext::InitializeForProcessSet), and aborts the process if it cannot. `address`: the address that the error
    message suggests; default: the loopback address. `beyond_this_host`: whether ranks run on other hosts, too.
    """
    name = socket.gethostname()
    found = own_address_at(name)
    if found is not None and not (beyond_this_host and is_loopback(found)):
        return
    address = address or host_addresses()[loopback()][0]
    wrong = f"resolves to {found}, which other hosts cannot reach" if found else "is not one of this host's addresses"
    raise UserError(
        f"The name {name} {wrong}. Horovod's Gloo listens there, whatever the interface. Set the address in /etc/hosts"
        f" (`{address} {name}`), or use MPI (`horovodrun --mpi`) or, in one process, --strategy none."
    )


def loopback() -> str:
    """Return the name of this host's loopback interface. Raises UserError if it has no address."""
    addresses = host_addresses()
    found = next((name for name, own in addresses.items() if any(map(is_loopback, own))), None)
    if found is None:
        raise UserError(
            f"{socket.gethostname()} has no loopback address (127.0.0.1, ::1), through which processes of one host"
            " communicate. Start the interface (`ip link set lo up`), or use --strategy none."
        )
    return found


def is_loopback(address: str) -> bool:
    """Return whether an IP address is a loopback address."""
    return ipaddress.ip_address(address).is_loopback


def own_address_at(name: str) -> str | None:
    """Resolve `name`, and return the first address that belongs to this host, as Gloo does; None if there is none."""
    try:
        found = [str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):  # an unknown or malformed name
        return None
    own = {address.split("%")[0] for addresses in host_addresses().values() for address in addresses}
    if "127.0.0.1" in own:  # then all of 127.0.0.0/8 is local
        own |= {address for address in found if address.startswith("127.")}
    return next((address for address in found if address.split("%")[0] in own), None)


def address_towards(host: str) -> str | None:
    """Return this host's address on the route to `host`, preferably IPv4; None if there is no route."""
    with suppress(OSError, UnicodeError):
        for family, kind, _, _, address in sorted(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # chooses the route without sending a packet
                return str(probe.getsockname()[0])
    return None


def interface_to(host: str) -> str | None:
    """Return this host's interface on the route to `host`; None if there is no route."""
    mine = address_towards(host)
    return next((name for name, own in host_addresses().items() if mine in own), None)


def host_addresses() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface of this host."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [str(address.address) for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
