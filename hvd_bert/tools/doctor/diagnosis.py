"""Run the checks of hosts and ranks, one after the other, each with a time limit."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.launch import Launcher, LaunchError, silent_status, speaks_for_host
from hvd_bert.distributed.slurm import check_tasks
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.tools.doctor import checks, collective, launch_line, probes
from hvd_bert.tools.doctor.lines import Report, failure, merged, ok, warning
from hvd_bert.tools.doctor.ranks import add_ranks, rank_here
from hvd_bert.tools.rendering import seconds

# Seconds by which other ranks time out later than rank 0: if one exited first, the launcher would kill rank 0 before
# it reports.
OTHERS_LATER_S = 30.0
INTERFACE = "the network interface or the subnet with HVD_BERT_INTERFACE (docs/guides/cluster.md)"


@contextmanager
def limited(report: Report, timeout: float, name: str, doing: str, hint: str) -> Iterator[None]:
    """Context manager: report a failure and end this process if the block takes longer than `timeout` seconds.

    Otherwise, ranks would wait forever for a missing rank. Ranks other than 0 get OTHERS_LATER_S more. `name`, `doing`,
    `hint`: check, finding and hint of the failure.
    """
    timeout += 0 if report.shown else OTHERS_LATER_S

    def expire() -> None:
        report.add(failure(name, f"{doing}: not finished after {timeout:.0f} s", hint))
        report.close()
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT)  # an exception would not end the main thread, which hangs in a library

    timer = threading.Timer(timeout, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def diagnose(flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    """Run all checks and print the report. Returns the exit status of this rank."""
    alone = launcher.name == "none"
    if alone:
        report.add(*checks.host_lines(launcher.name, flags.slots, flags.output_dir))
        if probes.horovod().error:  # importing Horovod could crash this process
            return report.close()
    hint = "Look for a rank that failed above. On several hosts, open the firewalls between them, and name"
    try:
        with limited(report, flags.timeout, "World", "the ranks do not find each other", f"{hint} {INTERFACE}."):
            world = HorovodWorld.join()
    except Exception as error:
        return _no_world(error, flags, launcher, report)
    if alone:
        try:
            check_tasks(launcher, os.environ)
        except LaunchError as error:  # only a warning: a host may be checked without a launcher
            report.add(warning("Tasks", str(error)))
        report.starts = launch_line.on_this_host()
    hint = "Rerun the check. If it fails again, check the network between the hosts."
    steps = [("World", partial(_examine_ranks, world, report), "the ranks do not respond", hint)]
    if not alone:
        examine = partial(_examine_hosts, flags, launcher, world, report)
        hint = "Run `hvd-bert doctor` alone on each host."
        steps.insert(0, ("Hosts", examine, "a host does not finish its checks", hint))
    if world.size > 1:
        measure = partial(_measure, int(flags.size * 1e6), world, report)
        hint = f"Name {INTERFACE}. If the network is only slow, use --size 10 or a longer --timeout."
        steps.append(("Allreduce", measure, "the ranks do not finish their allreduce", hint))
    for name, step, doing, hint in steps:
        try:
            with limited(report, flags.timeout, name, doing, hint):
                step()
        except CollectiveError as error:
            report.add(failure(name, str(error)))
            break
        except Exception as error:  # only on this rank: abort, so that the others do not wait
            reason = f"rank {world.rank} on {world.host}: {type(error).__name__}: {error}"
            report.add(failure(name, reason))
            report.close()
            if not report.shown:
                print(f"hvd_bert: {reason}", file=sys.stderr, flush=True)
            world.abort(EXIT_BAD_INPUT)
    status = world.broadcast(report.close())  # only rank 0's report is complete
    world.close()
    return int(status)


def _no_world(error: Exception, flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    """Report why this rank could not join the world. Returns the rank's exit status."""
    is_mistake = isinstance(error, UserError)
    reason = str(error) if is_mistake else f"{type(error).__name__}: {error}"
    if report.shown:
        if launcher.name != "none":
            report.add(*checks.host_lines(launcher.name, 1, flags.output_dir))
        hint = "" if is_mistake else "Fix the failures above first, then run env/setup.sh to rebuild Horovod."
        report.add(failure("World", reason, hint))
        return report.close()
    # Rank 0 reports the problems that all ranks have. Other ranks must not fail before it, and print only their own.
    no_horovod = bool(probes.horovod().error)
    if isinstance(error, CollectiveError):
        found_by_all = not error.mine
    else:
        found_by_all = isinstance(error, LaunchError) or (is_mistake and not speaks_for_host(os.environ))
    if no_horovod or not found_by_all:
        print(f"hvd_bert: rank {launcher.rank} on {platform.node()}: {reason}", file=sys.stderr, flush=True)
    is_reported = found_by_all or (no_horovod and is_mistake)
    return silent_status(os.environ, EXIT_BAD_INPUT) if is_reported else EXIT_BAD_INPUT


def _examine_hosts(flags: argparse.Namespace, launcher: Launcher, world: World, report: Report) -> None:
    """Check all hosts, each by its local rank 0, and add the results."""
    output_dir = flags.output_dir if world.rank == 0 else None
    found = checks.host_lines(launcher.name, world.local_size, output_dir) if world.local_rank == 0 else []
    report.add(*merged([(host, lines) for host, lines in world.allgather((world.host, found)) if lines]))


def _examine_ranks(world: World, report: Report) -> None:
    """Add the table of ranks and the checks that compare ranks. Raises CollectiveError if a device is refused."""
    world.set_up_device()
    add_ranks(world.allgather(rank_here(world)), report, world.controller)


def _measure(num_bytes: int, world: World, report: Report) -> None:
    """Measure the allreduce and add its figures. Raises CollectiveError if memory is short or the sum is wrong."""
    timings = collective.measure(world, num_bytes)
    report.data["allreduce"] = timings
    report.print_details(f"\n{collective.allreduce_table(timings)}\n")
    large = timings[0]
    found = f"correct sums; {num_bytes / 1e6:.1f} MB in {seconds(large['median_s'])}, {large['gb_per_s']:.2f} GB/s"
    report.add(ok("Allreduce", found))
