"""Start and end a rank's process. Commands call `run_as_rank(entry)`; programs call `run_in_program(entry)`.

ENDS lists the exit status and the report for each error class. ACTIONS lists how the process then ends.

Under Horovod elastic (`horovodrun --min-np ... --host-discovery-script ...`) a rank that loses other ranks, or is
notified of new hosts, joins the new world and calls `entry` again, which resumes after the last finished step.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch
from torch import distributed

from hvd_bert.config.strategies import ALONE, HOROVOD, STRATEGIES
from hvd_bert.distributed import events, logs, rendezvous
from hvd_bert.distributed.horovod_world import QUEUED_TOO_LATE, HorovodWorld, disconnect, ready_for_timeline
from hvd_bert.distributed.launch import (
    Launcher,
    LaunchError,
    find_launcher,
    is_elastic,
    silent_status,
    speaks_first,
    speaks_for_host,
    world_size_warning,
)
from hvd_bert.distributed.signals import watch_launcher
from hvd_bert.distributed.slurm import check_tasks, requested_tasks
from hvd_bert.distributed.world import CollectiveError, HostsChanged, ProcessState, World
from hvd_bert.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    UserError,
    find_user_error,
    log,
    short_reason,
)
from hvd_bert.streams import INTERRUPTED, in_main_thread, interruptible, keep_running

# Error class, exit status and report; the first matching row applies. A CollectiveError has a status of its own.
ENDS: tuple[tuple[type[BaseException], int, str], ...] = (
    (CollectiveError, EXIT_BAD_INPUT, "hvd_bert: {error}"),
    (UserError, EXIT_BAD_INPUT, "hvd_bert: {where}{error}"),
    (KeyboardInterrupt, EXIT_INTERRUPTED, INTERRUPTED),
    (
        torch.OutOfMemoryError,
        EXIT_FAILURE,
        "hvd_bert: rank {rank} on {host}: out of GPU memory ({error}). Halve --per_device_train_batch_size (or _eval_)"
        " and double --gradient_accumulation_steps, or use --bf16.",
    ),
    (Exception, EXIT_FAILURE, "rank {rank} on {host} {failure}"),
)
# ACTIONS: how a process ends after an error that all ranks raise, and after an error of this rank alone.
RAISE, EXIT, EXIT_SILENTLY, ABORT = "raise", "exit", "exit silently", "abort"
ACTIONS = {
    "program": (RAISE, RAISE),
    "thread of a program": (RAISE, ABORT),  # sys.exit would end this thread only
    "rank that reports": (EXIT, ABORT),
    "rank that does not report": (EXIT_SILENTLY, ABORT),
}
# Words in messages of errors that end elastic training. Mismatched collectives would recur in the next world.
_NOT_REPAIRED = ("ismatched", QUEUED_TOO_LATE)
# Words in Horovod's and Gloo's messages after another rank has died. These errors are reported without a traceback.
_PEER_IS_GONE = ("Horovod has been shut down", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def run_as_rank(entry: Callable[[World], None], strategy: str = "horovod", records_timeline: bool = False) -> NoReturn:
    """Join the world, call `entry(world)` and exit with 0. After an error, report it once and end all ranks.

    `entry` must clean up and close its files itself: after an error of one rank alone, `finally` blocks around this
    call do not run, and Python is not finalized. `records_timeline`: whether to prepare Horovod for a timeline.
    """
    _run(entry, strategy, records_timeline).end(EXIT_OK)


def run_in_program(entry: Callable[[World], None], strategy: str = "horovod", records_timeline: bool = False) -> None:
    """Run `entry` as `run_as_rank` does, but return afterwards.

    In a single process, and in a process group that the program has initialized, errors are raised without a report.
    """
    launcher = None if distributed.is_initialized() else find_launcher(os.environ)
    raises = launcher is None or (launcher.is_alone and not is_elastic(os.environ))
    try:
        _run(entry, strategy, records_timeline, raises).close()
    except CollectiveError as error:
        if error.status != EXIT_BAD_INPUT or not launcher or not raises:
            raise
        raise UserError(str(error)) from None  # a single process has no collectives


def _run(entry: Callable[[World], None], strategy: str, records_timeline: bool, raises: bool = False) -> World:
    """Join the world, run `entry`, and return the world, which is still joined. Errors are handled by `_end`.

    Under Horovod elastic, this repeats for each new world. `raises`: whether to raise errors to the program.
    """
    keep_running()
    with suppress(UserError):  # `join` raises it again
        watch_launcher(find_launcher(os.environ).row.is_watched)
    if records_timeline:
        ready_for_timeline(os.environ)
    process = ProcessState()
    while True:
        world = None
        try:
            in_group = distributed.is_initialized()
            logs.start(distributed.get_rank() if in_group else find_launcher(os.environ).rank or 0)
            world = join(strategy, process)
            logs.start(world.rank)  # may differ from the launcher's rank
            with interruptible():  # Ctrl-C must end the other ranks, too
                world.set_up_device()
                try:
                    entry(world)
                except SystemExit as error:
                    if raises or error.code:
                        raise
                    # A custom task must not end an unfinished run with status 0.
                    raise RuntimeError(f"sys.exit({error.code!r}) was called during the run") from error
            return world
        except (Exception, KeyboardInterrupt) as error:
            if not (world and world.elastic and _leave_for_next_world(world, error)):
                _end(error, world, raises)
        process.generation += 1


def _leave_for_next_world(world: World, error: BaseException) -> bool:
    """Leave a world of Horovod elastic if a new one can form after `error`. Returns whether it left."""
    from horovod.common.exceptions import HorovodInternalError

    if isinstance(error, HostsChanged):
        log.info("The hosts have changed: joining the new world.")
    # After any failed collective, a rank may be lost.
    elif isinstance(error, HorovodInternalError) and not any(words in str(error) for words in _NOT_REPAIRED):
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        logs.report(f"rank {world.rank} on {world.host}: {reason}. Joining the world of the remaining ranks.")
        disconnect(world.process)
    else:
        return False
    world.leave()
    return True


def _end(error: BaseException, world: World | None, raises: bool) -> None:
    """Report `error` on one rank, and end this process as ACTIONS lists. `world`: None if no world was joined."""
    shared = isinstance(error, CollectiveError if world else UserError)
    status, report = _status_and_report(error, world)
    process = "rank that reports" if report else "rank that does not report"
    if raises or not in_main_thread():
        process = "program" if raises else "thread of a program"
    action = ACTIONS[process][0 if shared else 1]
    if action == RAISE:
        if report:
            events.failed(short_reason(error))
        if world:
            world.close() if shared else world.leave()
        raise error
    if report:
        logs.report(report)
    if action == ABORT:
        (world or World()).abort(status)  # ranks that have initialized MPI would wait for this one
    if world:
        world.end(status)
    sys.exit(silent_status(os.environ, status) if action == EXIT_SILENTLY else status)


def _status_and_report(error: BaseException, world: World | None) -> tuple[int, str]:
    """Return this rank's exit status and report from ENDS. The report is "" if another rank reports the error."""
    rank, host = (world.rank, world.host) if world else ("?", socket.gethostname())
    shown = (find_user_error(error) if isinstance(error, ImportError) else None) or error
    status, report = next((status, report) for kind, status, report in ENDS if isinstance(shown, kind))
    reports = True
    if isinstance(error, CollectiveError):
        status, reports = error.status, error.mine if error.mine is not None else world is None or world.rank == 0
    elif isinstance(error, LaunchError):
        reports = speaks_first(os.environ)
    elif isinstance(error, UserError) and world is None:
        reports = speaks_for_host(os.environ)
    where, failure = f"rank {rank} on {host}: " if world else "", _failure(error)
    return status, report.format(error=shown, rank=rank, host=host, where=where, failure=failure) if reports else ""


def _failure(error: BaseException) -> str:
    """Describe a rank's error, with a traceback unless the loss of another rank caused it."""
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _PEER_IS_GONE):
        return f"lost another rank: {text.splitlines()[0]}"
    return f"failed:\n{traceback.format_exc()}"


def join(strategy: str = "horovod", process: ProcessState | None = None) -> World:
    """Join the launcher's world, with a strategy of `strategies.STRATEGIES`. Raises UserError if joining fails."""
    process = process or ProcessState()
    group = rendezvous.program_group()
    launcher = group or find_launcher(os.environ)
    alone = STRATEGIES[strategy].world == ALONE
    world = _alone(strategy, launcher) if alone else _together(strategy, process, launcher, group)
    world.launcher, world.process = launcher.name, process
    return world


def _together(strategy: str, process: ProcessState, launcher: Launcher, group: Launcher | None) -> World:
    if group is None:
        check_tasks(launcher, os.environ)
    world: World
    if STRATEGIES[strategy].world == HOROVOD:
        world = HorovodWorld.join(group, process)
    else:
        from hvd_bert.distributed.torch_world import DistributedWorld  # Horovod's strategy does not need it

        world = DistributedWorld.join(group)
    requested = requested_tasks(os.environ)
    if group is None and world.size < requested and world.rank == 0 and not world.elastic:
        log.warning(
            "The job requested %s tasks, but only %s rank(s) run. Start all of them (`srun --mpi=pmix`, -np %s), or"
            " request fewer (sbatch --ntasks-per-node).",
            requested,
            world.size,
            requested,
        )
    warning = world_size_warning(launcher, os.environ)
    if warning:
        log.warning(warning)
    return world


def _alone(strategy: str, launcher: Launcher) -> World:
    if (launcher.size or 1) > 1:
        raise LaunchError(
            f"--strategy {strategy} runs in one process, but there are {launcher.size} ({launcher.name}). Start one"
            " process without a launcher, or choose another strategy."
        )
    world = World()
    world.elastic = is_elastic(os.environ)  # refused later: only Horovod supports elastic training
    if STRATEGIES[strategy].several_gpus:
        world.devices = torch.cuda.device_count()
        if world.devices < 2:
            raise UserError(
                f"--strategy {strategy} needs at least 2 GPUs in one process, but {world.devices} are visible. Use"
                " --strategy none, or horovod with one rank per GPU."
            )
    return world
