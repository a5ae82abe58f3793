"""Start and end of a rank's process. Commands call `run_as_rank(entry)`, programs `run_in_program(entry)`.

Exit status: 0 done, 1 failure, 2 bad input, 130 interrupted, or the status of a CollectiveError. An error is reported
once.

Under Horovod elastic (`horovodrun --min-np ... --host-discovery-script ...`) a rank that loses other ranks, or is
notified of new hosts, joins the new world and calls `entry` again, which resumes after the last finished step.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import distributed

from hvd_bert.distributed import events, logs, rendezvous
from hvd_bert.distributed.horovod_world import HorovodWorld, ready_for_timeline
from hvd_bert.distributed.launch import (
    BY_TORCH,
    Launcher,
    LaunchError,
    find_launcher,
    is_elastic,
    note_on_one_process,
    speaks_first,
)
from hvd_bert.distributed.slurm import check_tasks, requested_tasks
from hvd_bert.distributed.world import CollectiveError, HostsChanged, World, abort_mpi, log
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, UserError, reason_of
from hvd_bert.streams import INTERRUPTED, in_main_thread, interruptible, keep_running

# From Horovod's and Gloo's messages after another rank has died. Other errors are reported with a traceback.
_PEER_IS_GONE = ("Horovod has been shut down", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def run_as_rank(entry: Callable[[World], None], strategy: str = "horovod", records_timeline: bool = False) -> NoReturn:
    """Join the world, call `entry(world)` and exit with 0. After an error, report it once and end all ranks.

    It does not return, and may skip `finally` blocks around this call: `entry` must clean up itself.

    `records_timeline`: whether Horovod records a timeline of some steps. It prepares for that when it starts.
    """
    _run(entry, strategy, records_timeline).end(EXIT_OK)


def run_in_program(entry: Callable[[World], None], strategy: str = "horovod", records_timeline: bool = False) -> None:
    """As `run_as_rank`, but return afterwards. Errors are raised, and not reported, by a single process and by the
    ranks of a process group that the program has initialized: whoever started them decides what ends.
    """
    launcher = None if distributed.is_initialized() else find_launcher(os.environ)
    if launcher and (not launcher.is_alone or is_elastic(os.environ)):
        _run(entry, strategy, records_timeline).close()
        return
    keep_running()
    if records_timeline:
        ready_for_timeline(os.environ)
    logs.start((launcher.rank or 0) if launcher else distributed.get_rank())
    world = join(strategy)
    try:
        with interruptible():
            world.set_up_device()
            entry(world)
    except CollectiveError as error:
        if world.rank == error.rank:
            events.failed(reason_of(error))
        world.close()
        raise
    except BaseException as error:
        events.failed(reason_of(error))
        world.leave()
        raise
    world.close()


def _run(entry: Callable[[World], None], strategy: str, records_timeline: bool) -> World:
    """Run `entry` to its end. Returns its world, which is still open."""
    keep_running()
    if records_timeline:
        ready_for_timeline(os.environ)
    generation = 0
    while True:
        world = _join(strategy, generation)
        try:
            with interruptible():  # the other ranks must not wait for this one
                world.set_up_device()
                entry(world)
        except HostsChanged:
            log.info("The hosts have changed: joining the new world.")
        except CollectiveError as error:
            if not in_main_thread():
                world.close()
                raise
            _report(error, shown=world.rank == error.rank)
            world.end(error.status)
        except UserError as error:
            world.abort(_report(UserError(f"rank {world.rank} on {world.host}: {error}"), shown=True))
        except KeyboardInterrupt:
            logs.report(INTERRUPTED)
            world.abort(EXIT_INTERRUPTED)
        except torch.OutOfMemoryError as error:
            logs.report(
                f"hvd_bert: rank {world.rank} on {world.host}: out of GPU memory ({error}). Halve"
                " --per_device_train_batch_size (or _eval_) and double --gradient_accumulation_steps, or use --bf16."
            )
            world.abort(EXIT_FAILURE)
        except Exception as error:
            where = f"rank {world.rank} on {world.host}"
            if not (world.elastic and _may_be_lost_rank(error)):
                logs.report(_failure(error, where))
                world.abort(EXIT_FAILURE)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            logs.report(f"{where}: {reason}. Joining the world of the remaining ranks.")
            world.disconnect()
        else:
            return world
        world.leave()
        generation += 1


def _join(strategy: str, generation: int) -> World:
    launcher = Launcher("none", None, None)
    try:
        launcher = find_launcher(os.environ)
        logs.start(launcher.rank or 0)
        world = join(strategy, generation)
    except UserError as error:
        if not in_main_thread():
            raise  # sys.exit would end this thread only
        # All processes have a CollectiveError or LaunchError. Only those that report it fail: another's failure could
        # make the launcher kill them before they have.
        shown = error.mine if isinstance(error, CollectiveError) else True
        if isinstance(error, LaunchError):
            shown = speaks_first(os.environ)
        if shown:
            sys.exit(_report(error, shown=True))
        sys.exit(EXIT_BAD_INPUT if launcher.name == BY_TORCH else EXIT_OK)  # by which each process ends on its own
    except Exception as error:
        logs.report(_failure(error, f"a rank on {socket.gethostname()}"))
        _abort_all()
    logs.start(world.rank)  # which may differ from the launcher's rank
    return world


def _abort_all() -> NoReturn:
    """End all ranks while there is no world yet: ranks that have initialized MPI would wait for this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        abort_mpi(mpi.COMM_WORLD, EXIT_FAILURE)
    os._exit(EXIT_FAILURE)  # the launcher sees the status and ends the others


def _may_be_lost_rank(error: Exception) -> bool:
    """Under Horovod elastic, whether another rank may be lost: any failed collective, whatever its message.

    Mismatched collectives are a defect, which would repeat in the next world.
    """
    from horovod.common.exceptions import HorovodInternalError

    return isinstance(error, HorovodInternalError) and "ismatched" not in str(error)


def _failure(error: Exception, where: str) -> str:
    """The report of a rank that failed: without a traceback if another rank is gone."""
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _PEER_IS_GONE):
        return f"{where} lost another rank: {text.splitlines()[0]}"
    return f"{where} failed:\n{traceback.format_exc()}"


def _report(error: UserError, shown: bool) -> int:
    if shown:
        logs.report(f"hvd_bert: {error}")
    return EXIT_BAD_INPUT


def join(strategy: str = "horovod", generation: int = 0) -> World:
    """Join the launcher's world, for a strategy of `settings.STRATEGIES`. Raises UserError if it cannot.

    `generation`: under Horovod elastic, how many worlds this process was in before.
    """
    group = rendezvous.group_of_program()
    launcher = group or find_launcher(os.environ)
    if strategy in ("none", "dp"):
        world = _alone(strategy, launcher)
    else:
        world = _together(strategy, generation, launcher, group)
    world.launcher = launcher.name
    return world


def _together(strategy: str, generation: int, launcher: Launcher, group: rendezvous.Group | None) -> World:
    if group is None:
        check_tasks(launcher, os.environ)
    world: World
    if strategy == "horovod":
        world = HorovodWorld.join(generation, group)
    else:
        from hvd_bert.distributed.torch_world import DistributedWorld  # Horovod's runs do not need it

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
    note = note_on_one_process(launcher, os.environ)
    if note:
        log.warning(note)
    return world


def _alone(strategy: str, launcher: Launcher) -> World:
    if (launcher.size or 1) > 1:
        raise LaunchError(
            f"--strategy {strategy} runs in one process, but there are {launcher.size} ({launcher.name}). Start one"
            " process without a launcher, or choose another strategy."
        )
    world = World()
    world.elastic = is_elastic(os.environ)  # refused later: only Horovod is elastic
    if strategy == "dp":
        world.devices = torch.cuda.device_count()
        if world.devices < 2:
            raise UserError(
                f"--strategy dp needs at least 2 GPUs in one process, but {world.devices} are visible. Use"
                " --strategy none, or horovod with one rank per GPU."
            )
    return world
