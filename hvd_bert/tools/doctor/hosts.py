"""Combine the reports of several hosts' doctors, and print the horovodrun line that starts a training on them."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hvd_bert.distributed.devices import RankInfo, check_devices, choose_device
from hvd_bert.distributed.interfaces import SETTING, address_towards, own_address_at
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import convert
from hvd_bert.tools.doctor import launch_line
from hvd_bert.tools.doctor.lines import OK, CheckResult, HostReport, Report, failure, merged, ok
from hvd_bert.tools.doctor.ranks import Rank, described, fit_lines, ranks_table


def conclude(
    found: Mapping[str, HostReport], slots: Mapping[str, int], flags: argparse.Namespace, report: Report
) -> int:
    """Make one report of the hosts' reports. Returns the exit status."""
    report.add(*merged([(host, _results(each, host == next(iter(found)))) for host, each in found.items()]))
    ranks: list[Rank] = []
    if report.ready or all(each.ranks for each in found.values()):
        try:
            ranks = _planned(found, slots)
        except ValueError as error:  # a UserError, or a host has another version
            report.add(failure("Ranks", str(error)))
    if ranks:
        report.data["ranks"] = [rank.as_dict() for rank in ranks]
        report.print_details(f"\n{ranks_table(ranks)}\n")
        report.add(ok("Ranks", described(ranks)), *fit_lines(ranks))
    report.data["command"] = _command(slots, ranks, flags) if report.ready else ""
    report.starts = {described(ranks): report.data["command"]} if report.ready else {}
    return report.close("Ready: a training would start on these hosts")


def _results(found: HostReport, first: bool) -> list[CheckResult]:
    """The results of a host. Omits its world of one rank, and the output folder where rank 0 is not."""
    lines = [line for line in found.checks if line.name != "World" or line.status != OK]
    return lines if first else [line for line in lines if line.name != "Output"]


def _planned(found: Mapping[str, HostReport], slots: Mapping[str, int]) -> list[Rank]:
    """The ranks as horovodrun would start them. Raises UserError if a host has too few GPUs, or reports no ranks."""
    ranks: list[Rank] = []
    for host, each in found.items():
        if not each.ranks:
            raise UserError(f"{host} reports no ranks. Use the same clone on all hosts.")
        own = convert({**each.ranks[0], "info": each.ranks[0]}, Rank)
        address = _address(host, [*found])
        used = next((name for name, addresses in own.addresses.items() if address in addresses), "unknown")
        for local_rank in range(slots[host]):
            try:
                device = choose_device(len(own.gpus), local_rank, slots[host])
            except UserError as error:
                raise UserError(f"{host}: {error}") from None
            device_id = own.info.device_id if device == own.info.device else None  # that of the first GPU is known
            info = RankInfo(len(ranks), host, local_rank, device, device_id, own.info.cores)
            ranks.append(replace(own, info=info, interface=own.interface or used))
    check_devices([rank.info for rank in ranks])
    return ranks


def _address(host: str, hosts: Sequence[str]) -> str:
    """The address by which other hosts reach this one; "" if unknown. This host's own name may lead to its loopback."""
    others = [other for other in hosts if other != host]
    if own_address_at(host) and others:
        return address_towards(others[0]) or ""
    try:
        return socket.gethostbyname(host)
    except OSError:  # IPv6 only
        return ""


def _setting(ranks: Sequence[Rank]) -> str:
    """HVD_BERT_INTERFACE for the ranks: as it is set, or a subnet if their interfaces have different names; else ""."""
    interface_of = {rank.info.host: rank.interface for rank in ranks}
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
    return str(subnet) if subnet.prefixlen else ""  # IPv4 and IPv6 have none in common


def _command(slots: Mapping[str, int], ranks: Sequence[Rank], flags: argparse.Namespace) -> str:
    """The line to type."""
    setting = _setting(ranks)
    options = ["--ssh-port", str(flags.ssh_port)] if flags.ssh_port else []
    options += ["--ssh-identity-file", str(flags.ssh_identity_file)] if flags.ssh_identity_file else []
    if setting:  # with Gloo, horovodrun itself listens there
        here = next((rank for rank in ranks if own_address_at(rank.info.host)), ranks[0])
        options += ["--network-interfaces", here.interface]
    return launch_line.horovodrun(slots, options, interface=setting)
