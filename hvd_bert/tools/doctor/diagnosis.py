"""Run the checks of the hosts and of the ranks, one after the other, each with a time limit."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.launch import Launcher, LaunchError
from hvd_bert.distributed.logs import describe_ranks, ranges
from hvd_bert.distributed.slurm import check_tasks
from hvd_bert.distributed.world import CollectiveError, RankInfo, World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.machine import PACKAGES, version_of
from hvd_bert.tools.doctor import checks, collective, probes
from hvd_bert.tools.doctor.probes import ProbeError
from hvd_bert.tools.doctor.report import FAILURE, OK, WARNING, WIDTH, Line, Report, isolated, merged
from hvd_bert.tools.rendering import seconds
from hvd_bert.tools.rendering.page import Grid
from hvd_bert.version import __version__

# Rank 0 times out first and reports: after another rank's exit, the launcher would kill it.
OTHERS_LATER_S = 30.0


class StepTimeout:
    """Ends this process with a failure line if a step takes too long, as a missing rank would block it forever."""

    def __init__(self, report: Report, timeout: float) -> None:
        self.report = report
        self.timeout = timeout if report.shown else timeout + OTHERS_LATER_S
        self.name = ""
        self._timer: threading.Timer | None = None

    def step(self, name: str, doing: str, hint: str) -> None:
        """Start the next step and restart the timer."""
        self.done()
        self.name = name
        self._timer = threading.Timer(self.timeout, self._expire, (Line(name, FAILURE, doing, hint),))
        self._timer.daemon = True
        self._timer.start()

    def done(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()

    def _expire(self, line: Line) -> None:
        found = f"{line.found}: not finished after {self.timeout:.0f} s"
        self.report.add([Line(line.name, line.status, found, line.hint)])
        self.report.close()
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT)  # the main thread hangs in a library


def diagnose(flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    """Run all checks. Returns the exit status of this rank."""
    alone = launcher.name == "none"
    if alone:  # first: a crash of Horovod must not hide these
        report.add(checks.host_lines(launcher.name, 1, flags.output_dir))
    step_timeout = StepTimeout(report, flags.timeout)
    step_timeout.step(
        "World",
        "the ranks do not find each other",
        "Look for a rank that failed above. On several hosts, name the network interface or the subnet with"
        " HVD_BERT_INTERFACE (docs/guides/cluster.md), and open the firewalls between them.",
    )
    try:
        world = HorovodWorld.join()
    except Exception as error:
        step_timeout.done()
        return _no_world(error, flags, launcher, report)
    try:
        if alone:
            report.add(_task_lines(launcher))
        else:
            step_timeout.step("Hosts", "a host does not finish its checks", "Run `hvd-bert doctor` alone on each host.")
            _examine_hosts(flags, launcher, world, report)
        step_timeout.step(
            "World",
            "the ranks do not respond",
            "Rerun the check. If it fails again, check the network between the hosts.",
        )
        if _examine_ranks(world, report) and world.size > 1:
            step_timeout.step(
                "Allreduce",
                "the ranks do not finish their allreduce",
                "Name the network interface or the subnet with HVD_BERT_INTERFACE (docs/guides/cluster.md)."
                " If the network is only slow, use --size 10 or a longer --timeout.",
            )
            _measure(int(flags.size * 1e6), world, report)
    except Exception as error:  # on this rank only: the others must not wait for it
        step_timeout.done()
        failure = f"rank {world.rank} on {world.host}: {type(error).__name__}: {error}"
        report.add([Line(step_timeout.name, FAILURE, failure)])
        report.close()
        if not report.shown:
            print(f"hvd_bert: {failure}", file=sys.stderr, flush=True)
        world.abort(EXIT_BAD_INPUT)
    step_timeout.done()
    status = world.broadcast(report.close())  # rank 0 has all lines
    world.close()
    return int(status)


def _no_world(error: Exception, flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    failure = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if not report.shown:
        # Rank 0 reports problems of all ranks, and this rank must not fail before it. This rank prints only its own.
        no_horovod = isinstance(probes.horovod(), ProbeError)
        found_by_all = isinstance(error, LaunchError) or (isinstance(error, CollectiveError) and not error.mine)
        if no_horovod or not found_by_all:
            print(f"hvd_bert: rank {launcher.rank} on {platform.node()}: {failure}", file=sys.stderr, flush=True)
        return EXIT_OK if found_by_all or (no_horovod and isinstance(error, UserError)) else EXIT_BAD_INPUT
    if launcher.name != "none":
        report.add(checks.host_lines(launcher.name, 1, flags.output_dir))
    rebuild = "Fix the failures above first, then run env/setup.sh to rebuild Horovod."
    hint = "" if isinstance(error, UserError) else rebuild
    report.add([Line("World", FAILURE, failure, hint)])
    return report.close()


def _task_lines(launcher: Launcher) -> list[Line]:
    try:
        check_tasks(launcher, os.environ)
    except LaunchError as error:  # a warning: the check of a host is a process without a launcher
        return [Line("Tasks", WARNING, str(error))]
    return []


def _examine_hosts(flags: argparse.Namespace, launcher: Launcher, world: World, report: Report) -> None:
    """Add the checks of all hosts. The first rank of each host runs them."""
    output_dir = flags.output_dir if world.rank == 0 else None
    leads = world.local_rank == 0
    found = checks.host_lines(launcher.name, world.local_size, output_dir) if leads else []
    report.add(merged([(host, lines) for host, lines in world.allgather((world.host, found)) if lines]))


def _examine_ranks(world: World, report: Report) -> bool:
    """Add the table of ranks and the checks whether they fit together. Returns False if a device is refused."""
    try:
        world.set_up_device()
    except CollectiveError as error:
        report.add([Line("World", FAILURE, str(error))])
        return False
    own = Rank(world.rank_infos[world.rank], versions(collective.mpi_library(world)), os.cpu_count() or 1)
    ranks = world.allgather(own)
    report.data["ranks"] = [rank.as_dict() for rank in ranks]
    if world.size > 1:
        report.print_text(f"\n{ranks_table(ranks)}\n")
    report.add(isolated("World", lambda: rank_lines(ranks, world.controller)))
    return True


def _measure(num_bytes: int, world: World, report: Report) -> None:
    """Add the figures of the allreduce to the report."""
    try:
        timings = collective.measure(world, num_bytes)
    except CollectiveError as error:
        report.add([Line("Allreduce", FAILURE, str(error))])
        return
    report.data["allreduce"] = [timing.as_dict() for timing in timings]
    report.print_text(f"\n{collective.allreduce_table(timings)}\n")
    found = f"correct sums; {num_bytes / 1e6:.1f} MB in {seconds(timings[0].median_s)}"
    report.add([Line("Allreduce", OK, found)])


@dataclass(frozen=True)
class Rank:
    """A rank's host and device, the versions of its packages, and the number of cores of its host."""

    info: RankInfo
    versions: dict[str, str] = field(default_factory=dict)
    host_cores: int = 1

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self.info) | {"cores": sorted(self.info.cores), "versions": self.versions}


def versions(mpi_library: str) -> dict[str, str]:
    """The versions of this process's packages. `mpi_library`: version of the MPI in use, if any."""
    found = {"hvd_bert": __version__, "python": platform.python_version()}
    found |= {package: number for package in PACKAGES if (number := version_of(package))}
    found["torch"] = torch.__version__  # with the CUDA that it was built for
    if torch.version.cuda:
        found["CUDA of torch"] = torch.version.cuda
        found["NCCL of torch"] = ".".join(map(str, torch.cuda.nccl.version()))
    if mpi_library:
        found["MPI"] = mpi_library
    return found


def ranks_table(ranks: Sequence[Rank]) -> str:
    """One row per rank. Versions that all ranks share are listed once, below."""
    common = set.intersection(*(set(rank.versions.items()) for rank in ranks))
    rows = []
    for rank in ranks:
        own = ", ".join(f"{name} {value}" for name, value in rank.versions.items() if (name, value) not in common)
        info, cores = rank.info, ranges(sorted(rank.info.cores))
        rows.append([info.host, str(info.rank), str(info.local_rank), info.device, cores, own or "as all"])
    grid = Grid(["host", "rank", "local rank", "device", "cores", "versions"], rows, words=6)
    same = ", ".join(f"{name} {value}" for name, value in ranks[0].versions.items() if (name, value) in common)
    shared = textwrap.fill(f"all ranks: {same}", WIDTH, initial_indent="  ", subsequent_indent="    ")
    return f"{grid.for_terminal()}\n{shared}"


def rank_lines(ranks: Sequence[Rank], controller: str) -> list[Line]:
    """Whether the ranks fit together."""
    hosts = list(dict.fromkeys(rank.info.host for rank in ranks))
    connection = {"mpi": "MPI", "gloo": "Gloo"}.get(controller, "nothing (one rank)")
    device = "on CPUs" if ranks[0].info.device == "cpu" else "each with a GPU"  # World has checked that all agree
    found = f"{len(ranks)} rank(s) on {len(hosts)} host(s), {device}, connected through {connection}"
    return [Line("World", OK, found), *([_versions_line(ranks)] if len(ranks) > 1 else []), *_cores_lines(ranks)]


def _versions_line(ranks: Sequence[Rank]) -> Line:
    names = dict.fromkeys(name for rank in ranks for name in rank.versions)
    differing = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank in ranks:
            ranks_of.setdefault(rank.versions.get(name, "missing"), []).append(rank.info.rank)
        if len(ranks_of) > 1:
            parts = (f"{value} on {describe_ranks(which)}" for value, which in ranks_of.items())
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
    on_host = Counter(rank.info.host for rank in ranks)
    bound = [rank for rank in ranks if len(rank.info.cores) == 1 and rank.host_cores >= 2 * on_host[rank.info.host]]
    if bound:
        return [
            Line(
                "Cores",
                WARNING,
                f"{describe_ranks([rank.info.rank for rank in bound])} may use only one of"
                f" {bound[0].host_cores} cores on {bound[0].info.host}; Horovod's own thread needs a second",
                "mpirun binds up to 2 ranks to a core each: add `--bind-to none`. Slurm: --cpus-per-task=N.",
            )
        ]
    sharers = Counter((rank.info.host, rank.info.cores) for rank in ranks)
    crowded = [
        f"{n} ranks share {len(cores)} core(s) on {host}" for (host, cores), n in sharers.items() if n > len(cores)
    ]
    hint = "Start fewer ranks per host, or request more cores (Slurm: --cpus-per-task=N)."
    return [Line("Cores", WARNING, f"{'; '.join(crowded)}: they slow each other down", hint)] if crowded else []
