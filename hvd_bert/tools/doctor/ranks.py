"""The ranks of a world: host, device, cores and versions of each, and whether they fit together."""

from __future__ import annotations

import os
import platform
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hvd_bert import __version__
from hvd_bert.distributed.launch import RankInfo
from hvd_bert.distributed.world import World
from hvd_bert.rendering.table import table
from hvd_bert.tools.doctor.report import FAILURE, OK, WARNING, WIDTH, Line

PACKAGES = ("horovod", "transformers", "tokenizers", "datasets", "numpy", "mpi4py")


@dataclass(frozen=True)
class Rank:
    """A rank's host and device, the versions of its packages, and the number of cores of its host."""

    info: RankInfo
    versions: dict[str, str] = field(default_factory=dict)
    host_cores: int = 1

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        info = self.info
        return {
            "rank": info.rank,
            "host": info.host,
            "local_rank": info.local_rank,
            "device": info.device,
            "device_id": info.device_id,
            "cores": sorted(info.cores),
            "versions": self.versions,
        }


def versions(mpi_library: str) -> dict[str, str]:
    """The versions of this process's packages. `mpi_library`: version of the MPI in use, if any."""
    found = {"hvd_bert": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    if torch.version.cuda:
        found["CUDA of torch"] = torch.version.cuda
        found["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
    if mpi_library:
        found["MPI"] = mpi_library
    return found


def ranges(numbers: Sequence[int] | frozenset[int]) -> str:
    """Numbers as ranges: "0-3,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def ranks_table(ranks: Sequence[Rank]) -> str:
    """One row per rank. Versions that all ranks share are listed once, below."""
    common = set.intersection(*(set(rank.versions.items()) for rank in ranks))
    rows: list[Sequence[object]] = [("host", "rank", "local rank", "device", "cores", "versions")]
    for rank in ranks:
        own = ", ".join(f"{name} {value}" for name, value in rank.versions.items() if (name, value) not in common)
        info = rank.info
        rows.append((info.host, info.rank, info.local_rank, info.device, ranges(info.cores), own or "as all"))
    same = ", ".join(f"{name} {value}" for name, value in ranks[0].versions.items() if (name, value) in common)
    shared = textwrap.fill(f"all ranks: {same}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return f"{table(rows)}\n{shared}"


def rank_lines(ranks: Sequence[Rank], controller: str) -> list[Line]:
    """Whether the ranks fit together."""
    hosts = list(dict.fromkeys(rank.info.host for rank in ranks))
    connection = {"mpi": "MPI", "gloo": "Gloo"}.get(controller, "nothing (one rank)")
    device = "on CPUs" if ranks[0].info.device == "cpu" else "each with a GPU"  # World has checked that all agree
    lines = [
        Line("World", OK, f"{len(ranks)} rank(s) on {len(hosts)} host(s), {device}, connected through {connection}")
    ]
    if len(ranks) > 1:
        lines.append(_versions_line(ranks))
    lines += _cores_lines(ranks)
    return lines


def _versions_line(ranks: Sequence[Rank]) -> Line:
    names = dict.fromkeys(name for rank in ranks for name in rank.versions)
    differing = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank in ranks:
            ranks_of.setdefault(rank.versions.get(name, "missing"), []).append(rank.info.rank)
        if len(ranks_of) > 1:
            parts = (f"{value} on rank(s) {ranges(which)}" for value, which in ranks_of.items())
            differing.append(f"{name} is {' and '.join(parts)}")
    if not differing:
        return Line("Versions", OK, "the same on all ranks")
    return Line(
        "Versions",
        FAILURE,
        "; ".join(differing),
        "Use one environment on all hosts: on a shared file system, or set up by the same env/setup.sh command on each."
        " Load the same modules on each.",
    )


def _cores_lines(ranks: Sequence[Rank]) -> list[Line]:
    """A warning if there are more ranks than cores, or if ranks leave most of a host unused."""
    crowded = []
    sharers = Counter((rank.info.host, rank.info.cores) for rank in ranks)
    on_host = Counter(rank.info.host for rank in ranks)
    bound = [rank for rank in ranks if len(rank.info.cores) == 1 and rank.host_cores >= 2 * on_host[rank.info.host]]
    if bound:
        return [
            Line(
                "Cores",
                WARNING,
                f"rank(s) {ranges([rank.info.rank for rank in bound])} may use only one of"
                f" {bound[0].host_cores} cores on {bound[0].info.host}; Horovod's own thread needs a second",
                "mpirun binds up to 2 ranks to a core each: add `--bind-to none`. Slurm: --cpus-per-task=N.",
            )
        ]
    for (host, cores), count in sharers.items():
        if count > len(cores):
            crowded.append(f"{count} ranks share {len(cores)} core(s) on {host}")
    if not crowded:
        return []
    return [
        Line(
            "Cores",
            WARNING,
            "; ".join(crowded) + ": they slow each other down",
            "Start fewer ranks per host, or request more cores (Slurm: --cpus-per-task=N).",
        )
    ]


def own_rank(world: World, mpi_library: str) -> Rank:
    """The rank of this process."""
    return Rank(world.rank_infos[world.rank], versions(mpi_library), os.cpu_count() or 1)
