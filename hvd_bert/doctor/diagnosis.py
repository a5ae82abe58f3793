"""The checks of a host, and of the ranks of a world, one after the other, each within a time limit."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import threading

from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.launch import Launcher
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.doctor import checks, collective, probes
from hvd_bert.doctor.probes import ProbeError
from hvd_bert.doctor.ranks import own_rank, rank_lines, ranks_table
from hvd_bert.doctor.report import FAILURE, Line, Report, isolated, merged
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError

# Later than rank 0, which must have spoken before the launcher ends it for another rank's status.
OTHERS_LATER_S = 30.0


class StepTimeout:
    """Ends this process, with a failure line, if a step takes too long: ranks that never come are waited for."""

    def __init__(self, report: Report, timeout: float) -> None:
        self.report = report
        self.timeout = timeout if report.shown else timeout + OTHERS_LATER_S
        self.name = ""
        self._timer: threading.Timer | None = None

    def step(self, name: str, doing: str, hint: str) -> None:
        """The next step starts, and the time counts anew."""
        self.done()
        self.name = name
        self._timer = threading.Timer(self.timeout, self._expire, (Line(name, FAILURE, doing, hint),))
        self._timer.daemon = True
        self._timer.start()

    def done(self) -> None:
        """The step has ended."""
        if self._timer:
            self._timer.cancel()

    def _expire(self, line: Line) -> None:
        said = f"{line.found}: no end after {self.timeout:.0f} s"
        self.report.add([Line(line.name, line.status, said, line.hint)])
        self.report.close()
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT)  # the main thread hangs in a library


def diagnose(flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    """The whole way of the doctor. Returns the exit status of this rank."""
    alone = launcher.size is None
    if alone:  # first, so that a Horovod that crashes hides nothing
        report.add(checks.host_lines(launcher.name, 1, flags.output_dir))
    step_timeout = StepTimeout(report, flags.timeout)
    step_timeout.step(
        "World",
        "the ranks do not find each other",
        "Look for a rank that failed above. On several hosts name the interface that all have (`horovodrun"
        " --network-interfaces eth0`, `mpirun --mca btl_tcp_if_include eth0`), and let no firewall stand between them.",
    )
    try:
        world = HorovodWorld.join()
    except Exception as error:
        step_timeout.done()
        return _no_world(error, flags, launcher, report)
    try:
        if not alone:
            step_timeout.step(
                "Hosts", "a host does not finish its checks", "Run `python -m hvd_bert.doctor` alone on each host."
            )
            _examine_hosts(flags, launcher, world, report)
        step_timeout.step(
            "World", "the ranks do not answer", "Run it again; then look at the network between the hosts."
        )
        if _examine_ranks(world, report) and world.size > 1:
            step_timeout.step(
                "Allreduce",
                "the ranks do not finish their sums",
                "Name the interface that all hosts have (HOROVOD_GLOO_IFACE, NCCL_SOCKET_IFNAME or MPI's own setting)."
                " If the network is only slow: --size 10, or a longer --timeout.",
            )
            _measure(flags, world, report)
    except Exception as error:  # of this rank alone: the others must not wait for it
        step_timeout.done()
        said = f"rank {world.rank} on {world.host}: {type(error).__name__}: {error}"
        report.add([Line(step_timeout.name, FAILURE, said)])
        report.close()
        if not report.shown:
            print(f"hvd_bert: {said}", file=sys.stderr, flush=True)
        world.abort(EXIT_BAD_INPUT)
    step_timeout.done()
    status = world.broadcast(report.close())  # rank 0's, which has every line
    world.close()
    return int(status)


def _no_world(error: Exception, flags: argparse.Namespace, launcher: Launcher, report: Report) -> int:
    said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    if not report.shown:
        # Rank 0 says what all know, and must not be ended before it has; what may be wrong here only is said here.
        if not isinstance(error, UserError) or isinstance(probes.horovod(), ProbeError):
            print(f"hvd_bert: rank {launcher.rank} on {platform.node()}: {said}", file=sys.stderr, flush=True)
        return EXIT_OK if isinstance(error, UserError) else EXIT_BAD_INPUT
    if launcher.size is not None:
        report.add(checks.host_lines(launcher.name, 1, flags.output_dir))
    hint = (
        "" if isinstance(error, UserError) else "Mend the failures above first; then env/setup.sh builds Horovod anew."
    )
    report.add([Line("World", FAILURE, said, hint)])
    return report.close()


def _examine_hosts(flags: argparse.Namespace, launcher: Launcher, world: World, report: Report) -> None:
    """Add the checks of all hosts, each by its first rank."""
    output_dir = flags.output_dir if world.rank == 0 else None
    leads = world.local_rank == 0
    found = checks.host_lines(launcher.name, world.local_size, output_dir) if leads else []
    report.add(merged([(host, lines) for host, lines in world.allgather((world.host, found)) if lines]))


def _examine_ranks(world: World, report: Report) -> bool:
    """Add where the ranks sit and whether they fit together. False where devices are refused."""
    try:
        world.set_up_device()
    except CollectiveError as error:
        report.add([Line("World", FAILURE, str(error))])
        return False
    ranks = world.allgather(own_rank(world, collective.mpi_library(world)))
    report.data["ranks"] = [rank.as_dict() for rank in ranks]
    if world.size > 1:
        report.say(f"\n{ranks_table(ranks)}\n")
    report.add(isolated("World", lambda: rank_lines(ranks, world.controller)))
    return True


def _measure(flags: argparse.Namespace, world: World, report: Report) -> None:
    """Add the figures of the allreduce to the report."""
    num_bytes = collective.BERT_BASE_BYTES
    try:
        with world.raise_on_all_ranks():
            if flags.size is not None:
                num_bytes = int(flags.size * 1e6)
            elif flags.model is not None:
                num_bytes = collective.gradient_bytes(flags.model)
        timings = collective.measure(world, num_bytes, flags.repeats)
    except CollectiveError as error:
        report.add([Line("Allreduce", FAILURE, str(error))])
        return
    report.data["allreduce"] = [timing.as_dict() for timing in timings]
    report.say(f"\n{collective.allreduce_table(timings)}\n")
    report.add([collective.allreduce_line(timings)])
