"""Check the hosts in --hosts or --hostfile, all except this one over ssh, and print the horovodrun line."""

from __future__ import annotations

import argparse
import ipaddress
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from hvd_bert.config.settings import PACKAGE
from hvd_bert.distributed.devices import check_devices, choose_device
from hvd_bert.distributed.interfaces import SETTING, address_towards, own_address_at
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import convert, parse_json
from hvd_bert.tools.doctor import launch_line
from hvd_bert.tools.doctor.lines import OK, CheckResult, Report, failure, merged
from hvd_bert.tools.doctor.ranks import Rank, add_ranks, described

CLONE = PACKAGE.parent
# Environment variables to pass to the checks on other hosts, as horovodrun passes all variables to the ranks.
VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HVD_BERT_CACHE", SETTING)
# accept-new accepts a new host, as horovodrun does with StrictHostKeyChecking=no, but refuses a host with another key.
OPTIONS = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectTimeout=5")
AT_ONCE = 64  # hosts that are checked in parallel


@dataclass(frozen=True)
class HostReport:
    """The doctor's JSON report of a host. `ranks`: the doctor's own rank; empty if it could not join a world."""

    checks: tuple[CheckResult, ...]
    ranks: tuple[dict[str, Any], ...] = ()


def check_hosts(slots: Mapping[str, int], flags: argparse.Namespace, report: Report) -> int:
    """Check that each host can run a rank per slot, and print one report. Returns the exit status."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        examined = pool.map(lambda host: _examine(host, slots[host], flags), slots)
        found = dict(zip(slots, examined, strict=True))
    report.add(*merged([(host, _results(each, host == next(iter(slots)))) for host, each in found.items()]))
    ranks: list[Rank] = []
    if report.ready or all(each.ranks for each in found.values()):
        try:
            ranks = _planned(found, slots)
        except ValueError as error:  # a UserError, or a rank in another version's format
            report.add(failure("Ranks", str(error)))
        else:
            add_ranks(ranks, report)
    report.starts = {described(ranks): _start_line(slots, ranks, flags)} if report.ready else {}
    report.data["command"] = next(iter(report.starts.values()), "")
    return report.close("Ready: a training would start on these hosts")


def _results(found: HostReport, first: bool) -> list[CheckResult]:
    """Return a host's results, except a passed check "World" and, unless `first`, the check "Output"."""
    lines = [line for line in found.checks if line.name != "World" or line.status != OK]
    return lines if first else [line for line in lines if line.name != "Output"]


def _ssh(flags: argparse.Namespace) -> list[str]:
    """Build the ssh command with the flags' port and key."""
    port = ["-p", str(flags.ssh_port)] if flags.ssh_port else []
    return ["ssh", *port, *(["-i", str(flags.ssh_identity_file.absolute())] if flags.ssh_identity_file else [])]


def _examine(host: str, slots: int, flags: argparse.Namespace) -> HostReport:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        hint = f"Check its spelling, DNS and /etc/hosts with `getent hosts {host}`."
        return HostReport((failure("Name", f"does not resolve: {error.strerror}", hint),))
    try:
        words, limit = _command(host, slots, flags), flags.timeout
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd=CLONE, timeout=limit
        )
    except subprocess.TimeoutExpired:
        hint = f"Run `hvd-bert doctor` on {host}, or use a longer --timeout."
        return HostReport((failure("Doctor", f"not finished after {flags.timeout:.0f} s", hint),))
    except OSError as error:
        return HostReport((failure("ssh", f"cannot be started: {error}", "Install OpenSSH's client."),))
    try:
        return convert(parse_json(done.stdout.strip().rpartition("\n")[2]), HostReport)
    except ValueError:
        return _refused(host, done, flags)


def _command(host: str, slots: int, flags: argparse.Namespace) -> list[str]:
    """Build the command that runs the doctor on a host: over ssh, unless it is this host."""
    doctor = [sys.executable, "-m", "hvd_bert", "doctor", "--json", "--slots", str(slots)]
    doctor += ["--timeout", str(flags.timeout), "--output_dir", str(flags.output_dir.absolute())]
    if own_address_at(host) is not None:
        return doctor
    environ = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    there = [shlex.join(["cd", str(CLONE)]), shlex.join(["exec", "env", *environ, *doctor])]
    return [*_ssh(flags), *OPTIONS, host, " && ".join(there)]


def _refused(host: str, done: subprocess.CompletedProcess[str], flags: argparse.Namespace) -> HostReport:
    """Explain why the doctor printed no report on a host: ssh failed, or the doctor did not start."""
    last = (done.stderr.strip() or "it printed nothing").splitlines()[-1].strip()
    if done.returncode != 255:  # the status of ssh's own errors
        hint = f"{CLONE} and its environment must be the same on all hosts: share them, or set them up on each."
        return HostReport((failure("Clone", f"the doctor does not start: {last}", hint),))
    if "key verification failed" in last:
        hint = f"Its key is not the one in known_hosts. If {host} was set up again: `ssh-keygen -R {host}`."
    else:
        test = shlex.join([*_ssh(flags), host, "true"])
        hint = f"`{test}` must work without a password. `ssh-copy-id {host}` installs your key there."
    return HostReport((failure("ssh", last, hint),))


def _planned(found: Mapping[str, HostReport], slots: Mapping[str, int]) -> list[Rank]:
    """List the ranks that horovodrun would start.

    Raises UserError if a host reports no ranks or has too few GPUs, or if only some hosts have GPUs.
    """
    ranks: list[Rank] = []
    for host, each in found.items():
        if not each.ranks:
            raise UserError(f"{host} reports no ranks. Use the same clone on all hosts.")
        own = convert(each.ranks[0], Rank)
        address = _address(host, [*found])
        used = next((name for name, addresses in own.addresses.items() if address in addresses), "unknown")
        for local_rank in range(slots[host]):
            try:
                device = choose_device(len(own.gpus), local_rank, slots[host])
            except UserError as error:
                raise UserError(f"{host}: {error}") from None
            device_id = own.device_id if device == own.device else None  # reported only for the host's first GPU
            rank = replace(own, rank=len(ranks), host=host, local_rank=local_rank, interface=own.interface or used)
            ranks.append(replace(rank, device=device, device_id=device_id))
    check_devices(ranks)
    return ranks


def _address(host: str, hosts: Sequence[str]) -> str:
    """Return the address by which other hosts reach `host`; "" if unknown.

    For this host, uses the route to another host, because its own name may resolve to the loopback address.
    """
    others = [other for other in hosts if other != host]
    if own_address_at(host) and others:
        return address_towards(others[0]) or ""
    try:
        return socket.gethostbyname(host)
    except OSError:  # IPv6 only
        return ""


def _setting(ranks: Sequence[Rank]) -> str:
    """Choose HVD_BERT_INTERFACE for the ranks: its current value, or a subnet if interface names differ, else ""."""
    interface_of = {rank.host: rank.interface for rank in ranks}
    names = set(interface_of.values())
    if os.environ.get(SETTING) or len(names) == 1 or "unknown" in names:
        return os.environ.get(SETTING, "")
    found = [_address(host, [*interface_of]) for host in interface_of]
    if not all(found):
        return ""
    addresses = [ipaddress.ip_address(address) for address in found]
    subnet = ipaddress.ip_network(addresses[0])
    while subnet.prefixlen and not all(address in subnet for address in addresses):
        subnet = subnet.supernet()
    return str(subnet) if subnet.prefixlen else ""  # IPv4 and IPv6 addresses share no subnet


def _start_line(slots: Mapping[str, int], ranks: Sequence[Rank], flags: argparse.Namespace) -> str:
    """Build the horovodrun line that starts a training."""
    setting = _setting(ranks)
    options = ["--ssh-port", str(flags.ssh_port)] if flags.ssh_port else []
    options += ["--ssh-identity-file", str(flags.ssh_identity_file)] if flags.ssh_identity_file else []
    if setting:  # with Gloo, horovodrun itself listens on the interface
        here = next((rank for rank in ranks if own_address_at(rank.host)), ranks[0])
        options += ["--network-interfaces", here.interface]
    line = launch_line.horovodrun(slots, options)
    return f"{SETTING}={shlex.quote(setting)} {line}" if setting else line
