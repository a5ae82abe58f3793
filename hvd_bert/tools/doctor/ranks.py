"""Report on the ranks: a table of all ranks, and checks of versions, GPUs and cores."""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from hvd_bert.distributed.devices import RankInfo
from hvd_bert.distributed.interfaces import host_addresses, interface_named
from hvd_bert.distributed.logs import describe_ranks, ranges
from hvd_bert.distributed.mpi import library_name
from hvd_bert.distributed.world import World
from hvd_bert.machine import versions
from hvd_bert.tools.doctor import probes
from hvd_bert.tools.doctor.checks import torch_nccl
from hvd_bert.tools.doctor.lines import WIDTH, CheckResult, Report, failure, ok, warning
from hvd_bert.tools.rendering.page import Grid

LIBRARIES = {"mpi": "MPI", "gloo": "Gloo"}  # Horovod's controller -> name of the library


@dataclass(frozen=True)
class Rank(RankInfo):
    """A rank with its package versions and facts about its host.

    `gpus`, `driver`: models and driver version of the visible GPUs. `interface`: the network interface that is set for
    the ranks ("": the default). `addresses`: network interface -> its addresses.
    """

    versions: dict[str, str] = field(default_factory=dict)
    host_cores: int = 1
    gpus: tuple[str, ...] = ()
    driver: str = ""
    interface: str = ""
    addresses: dict[str, list[str]] = field(default_factory=dict)

    @property
    def gpu(self) -> str:
        """The model of the rank's GPU; "" on a CPU."""
        return self.gpus[int(self.device.removeprefix("cuda:"))] if self.gpus else ""


def rank_here(world: World) -> Rank:
    """Collect the facts about this process's rank. Its device must be set up."""
    return Rank(
        **vars(world.rank_infos[world.rank]),
        versions=own_versions(world),
        host_cores=os.cpu_count() or 1,
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        driver=probes.gpus().driver,
        interface=interface_named(os.environ, world.controller),
        addresses=host_addresses(),
    )


def own_versions(world: World) -> dict[str, str]:
    """Return the versions of packages, of torch's CUDA and NCCL and, if MPI connects the ranks, of MPI."""
    found = {name: version for name, version in versions().items() if version}
    found["torch"] = torch.__version__  # includes the build, such as +cu124
    if torch.version.cuda:
        found |= {"CUDA of torch": torch.version.cuda, "NCCL of torch": torch_nccl()}
    if world.controller == "mpi":
        found["MPI"] = library_name()
    return found


def add_ranks(ranks: Sequence[Rank], report: Report, controller: str = "") -> None:
    """Add the ranks and the checks that compare them to the report. With --verbose, also print the table of ranks.

    `controller`: Horovod's, "none" for a single rank; "" if the ranks have not joined a world.
    """
    report.data["ranks"] = [asdict(rank) | {"cores": sorted(rank.cores)} for rank in ranks]
    if controller != "none":
        report.print_details(f"\n{ranks_table(ranks)}\n")
    joined = f", connected through {LIBRARIES.get(controller, 'nothing (one rank)')}"
    world = ok("World", described(ranks) + joined) if controller else ok("Ranks", described(ranks))
    fits = [_versions_line(ranks)] if len(ranks) > 1 else []
    report.add(world, *fits, *_gpus_lines(ranks), *_cores_lines(ranks))


def ranks_table(ranks: Sequence[Rank]) -> str:
    """Format a table with a row per rank. Versions that are equal on all ranks are listed once, below."""
    common = set.intersection(*(set(rank.versions.items()) for rank in ranks))
    rows = []
    for rank in ranks:
        own = ", ".join(f"{name} {value}" for name, value in rank.versions.items() if (name, value) not in common)
        device = f"{rank.device} {rank.gpu}".strip()
        cells = [rank.host, str(rank.rank), str(rank.local_rank), device, rank.interface or "default"]
        rows.append([*cells, ranges(sorted(rank.cores)), own or "as all"])
    grid = Grid(["host", "rank", "local rank", "device", "interface", "cores", "versions"], rows, words=7)
    same = ", ".join(f"{name} {value}" for name, value in ranks[0].versions.items() if (name, value) in common)
    shared = textwrap.fill(f"all ranks: {same}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return f"{grid.for_terminal()}\n{shared}"


def described(ranks: Sequence[Rank]) -> str:
    """Describe ranks in a phrase, such as "4 rank(s) on 2 host(s), each with a GPU"."""
    hosts = {rank.host for rank in ranks}
    device = "on CPUs" if ranks[0].device == "cpu" else "each with a GPU"  # the same on all ranks
    return f"{len(ranks)} rank(s) on {len(hosts)} host(s), {device}"


def _versions_line(ranks: Sequence[Rank]) -> CheckResult:
    names = dict.fromkeys(name for rank in ranks for name in rank.versions)
    found = _differences(ranks, {name: [rank.versions.get(name, "missing") for rank in ranks] for name in names})
    if not found:
        return ok("Versions", "the same on all ranks")
    hint = "Use one environment on all hosts: on a shared file system, or set up by the same env/setup.sh command on"
    return failure("Versions", found, f"{hint} each. Load the same modules on each.")


def _gpus_lines(ranks: Sequence[Rank]) -> list[CheckResult]:
    """Warn if GPU models or drivers differ between ranks."""
    values = {"model": [rank.gpu for rank in ranks], "driver": [rank.driver for rank in ranks]}
    found = _differences(ranks, values) if ranks[0].gpus else ""
    hint = "The slowest GPU sets the speed of all. Use hosts with the same GPUs and drivers."
    return [warning("GPUs", found, hint)] if found else []


def _differences(ranks: Sequence[Rank], values: Mapping[str, Sequence[str]]) -> str:
    """Describe values that differ between ranks, with the ranks of each value; "" if none differ.

    `values`: name -> value of each rank.
    """
    differing = []
    for name, each in values.items():
        ranks_of: dict[str, list[int]] = {}
        for rank, value in zip(ranks, each, strict=True):
            ranks_of.setdefault(value, []).append(rank.rank)
        parts = [f"{value} on {describe_ranks(which)}" for value, which in ranks_of.items()]
        differing += [f"{name} is {' and '.join(parts)}"] if len(parts) > 1 else []
    return "; ".join(differing)


def _cores_lines(ranks: Sequence[Rank]) -> list[CheckResult]:
    """Warn if ranks share too few cores, or are bound to one core each although the host has two or more per rank."""
    on_host = Counter(rank.host for rank in ranks)
    bound = [rank for rank in ranks if len(rank.cores) == 1 and rank.host_cores >= 2 * on_host[rank.host]]
    if bound:
        found = f"{describe_ranks([rank.rank for rank in bound])} may use only one of {bound[0].host_cores} cores on"
        found += f" {bound[0].host}; Horovod's own thread needs a second core"
        hint = "mpirun binds up to 2 ranks to a core each: add `--bind-to none`. Slurm: --cpus-per-task=N."
        return [warning("Cores", found, hint)]
    sharers = Counter((rank.host, rank.cores) for rank in ranks)
    crowded = [
        f"{n} ranks share {len(cores)} core(s) on {host}" for (host, cores), n in sharers.items() if n > len(cores)
    ]
    hint = "Start fewer ranks per host, or request more cores (Slurm: --cpus-per-task=N)."
    return [warning("Cores", f"{'; '.join(crowded)}: they slow each other down", hint)] if crowded else []
