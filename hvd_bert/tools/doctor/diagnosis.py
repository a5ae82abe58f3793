"""Run the checks of the hosts and of the ranks, one after the other, each with a time limit."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import threading

from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.launch import Launcher, LaunchError
from hvd_bert.distributed.slurm import check_tasks
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.tools.doctor import checks, collective, launch_line, probes
from hvd_bert.tools.doctor.lines import CheckResult, Report, failure, isolated, merged, ok, warning
from hvd_bert.tools.doctor.probes import ProbeError
from hvd_bert.tools.doctor.ranks import rank_here, rank_lines, ranks_table
from hvd_bert.tools.rendering import seconds

# Rank 0 times out first and reports: after another rank's exit, the launcher would kill it.
OTHERS_LATER_S = 30.0


class StepTimeout:
    """Ends this process with a failure if a step takes too long, as a missing rank would block it forever."""

    def __init__(self, report: Report, timeout: float) -> None:
        self.report = report
        self.timeout = timeout if report.shown else timeout + OTHERS_LATER_S
        self.name = ""
        self._timer: threading.Timer | None = None

    def step(self, name: str, doing: str, hint: str) -> None:
        """Start the next step and restart the timer."""
        self.done()
        self.name = name
        self._timer = threading.Timer(self.timeout, self._expire, (doing, hint))
        self._timer.daemon = True
        self._timer.start()

    def done(self) -> None:
        """Stop the timer."""
        if self._timer:
            self._timer.cancel()

    def _expire(self, doing: str, hint: str) -> None:
        self.report.add(failure(self.name, f"{doing}: not finished after {self.timeout:.0f} s", hint))
        self.report.close()
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT)  # the main thread hangs in a library


def diagnose(flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    """Run all checks. Returns the exit status of this rank."""
    alone = launcher.name == "none"
    if alone:
        report.add(*checks.host_lines(launcher.name, flags.slots, flags.output_dir))
        if isinstance(probes.horovod(), ProbeError):  # its import may crash this process, too
            return report.close()
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
            report.add(*_task_lines(launcher))
            report.starts = launch_line.on_this_host()
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
        reason = f"rank {world.rank} on {world.host}: {type(error).__name__}: {error}"
        report.add(failure(step_timeout.name, reason))
        report.close()
        if not report.shown:
            print(f"hvd_bert: {reason}", file=sys.stderr, flush=True)
        world.abort(EXIT_BAD_INPUT)
    step_timeout.done()
    status = world.broadcast(report.close())  # rank 0 has all lines
    world.close()
    return int(status)


def _no_world(error: Exception, flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if not report.shown:
        # Rank 0 reports problems of all ranks, and this rank must not fail before it. This rank prints only its own.
        no_horovod = isinstance(probes.horovod(), ProbeError)
        found_by_all = isinstance(error, LaunchError) or (isinstance(error, CollectiveError) and not error.mine)
        if no_horovod or not found_by_all:
            print(f"hvd_bert: rank {launcher.rank} on {platform.node()}: {reason}", file=sys.stderr, flush=True)
        return EXIT_OK if found_by_all or (no_horovod and isinstance(error, UserError)) else EXIT_BAD_INPUT
    if launcher.name != "none":
        report.add(*checks.host_lines(launcher.name, 1, flags.output_dir))
    rebuild = "Fix the failures above first, then run env/setup.sh to rebuild Horovod."
    hint = "" if isinstance(error, UserError) else rebuild
    report.add(failure("World", reason, hint))
    return report.close()


def _task_lines(launcher: Launcher) -> list[CheckResult]:
    try:
        check_tasks(launcher, os.environ)
    except LaunchError as error:  # a warning: the check of a host is a process without a launcher
        return [warning("Tasks", str(error))]
    return []


def _examine_hosts(flags: argparse.Namespace, launcher: Launcher, world: World, report: Report) -> None:
    """Add the checks of all hosts. The first rank of each host runs them."""
    output_dir = flags.output_dir if world.rank == 0 else None
    leads = world.local_rank == 0
    found = checks.host_lines(launcher.name, world.local_size, output_dir) if leads else []
    report.add(*merged([(host, lines) for host, lines in world.allgather((world.host, found)) if lines]))


def _examine_ranks(world: World, report: Report) -> bool:
    """Add the table of ranks and the checks whether they fit together. Returns False if a device is refused."""
    try:
        world.set_up_device()
    except CollectiveError as error:
        report.add(failure("World", str(error)))
        return False
    ranks = world.allgather(rank_here(world))
    report.data["ranks"] = [rank.as_dict() for rank in ranks]
    if world.size > 1:
        report.print_details(f"\n{ranks_table(ranks)}\n")
    report.add(*isolated("World", lambda: rank_lines(ranks, world.controller)))
    return True


def _measure(num_bytes: int, world: World, report: Report) -> None:
    """Add the figures of the allreduce to the report."""
    try:
        timings = collective.measure(world, num_bytes)
    except CollectiveError as error:
        report.add(failure("Allreduce", str(error)))
        return
    report.data["allreduce"] = [timing.as_dict() for timing in timings]
    report.print_details(f"\n{collective.allreduce_table(timings)}\n")
    large = timings[0]
    found = f"correct sums; {num_bytes / 1e6:.1f} MB in {seconds(large.median_s)}, {large.gb_per_s:.2f} GB/s"
    report.add(ok("Allreduce", found))
