"""How a rank's process starts and ends: `run_as_rank(entry)` is the way into every command.

Exit status: 0 done, 1 failure, 2 bad input, and what a CollectiveError says. What is wrong is said once.

Under `horovodrun --min-np ... --host-discovery-script ...` (Horovod elastic) a rank whose peers are lost, or that is
told of new hosts, does not end: it joins the new world and calls `entry` again, which goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from hvd_bert.distributed import logs
from hvd_bert.distributed.horovod_world import ready_for_timeline
from hvd_bert.distributed.joining import join
from hvd_bert.distributed.launch import WorldsOfOne, find_launcher
from hvd_bert.distributed.world import CollectiveError, HostsChanged, World, log
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, UserError

# Of Horovod's and Gloo's messages, where another rank has died. Others (shapes that differ, NCCL's) are shown with a
# traceback.
_PEER_IS_GONE = ("Horovod has been shut down", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def run_as_rank(
    entry: Callable[[World], None],
    strategy: str = "horovod",
    records_timeline: bool = False,
    log_format: str | None = None,
) -> NoReturn:
    """Join the world, call `entry(world)`, leave with 0, or say once what is wrong and end every rank.

    It does not return, nor need it raise SystemExit: `entry` leaves everything in order itself.

    `records_timeline`: whether Horovod is to record its timeline of some steps, which it must know from the start.
    `log_format`: as `logs.start` takes it.
    """
    if records_timeline:
        ready_for_timeline(os.environ)
    generation = 0
    while True:
        world = _join(strategy, generation, log_format)
        try:
            world.set_up_device()
            entry(world)
        except HostsChanged:
            log.info("The hosts change: joining the new world.")
        except CollectiveError as error:
            _report(error, shown=world.rank == error.rank)
            world.end(error.status)
        except UserError as error:
            world.abort(_report(UserError(f"rank {world.rank} on {world.host}: {error}"), shown=True))
        except KeyboardInterrupt:
            world.abort(EXIT_FAILURE)
        except torch.OutOfMemoryError as error:
            logs.report(
                f"hvd_bert: rank {world.rank} on {world.host}: the GPU's memory is full ({error}). Halve"
                " --per_device_train_batch_size (or _eval_) and double --gradient_accumulation_steps, or use --bf16."
            )
            world.abort(EXIT_FAILURE)
        except Exception as error:
            where = f"rank {world.rank} on {world.host}"
            if not (world.elastic and _can_be_done_without(error)):
                logs.report(_failure(error, where))
                world.abort(EXIT_FAILURE)
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            logs.report(f"{where}: {reason}: joining the world of those that are left.")
        else:
            world.end(EXIT_OK)
        world.leave()
        generation += 1


def _join(strategy: str, generation: int, log_format: str | None) -> World:
    try:
        logs.start(find_launcher(os.environ).rank or 0, log_format)
        world = join(strategy, generation)
    except (WorldsOfOne, CollectiveError) as error:
        # All processes see it, and in worlds of one none can talk to another: one speaks, and alone fails, or the
        # others' end could make the launcher kill it before it has spoken.
        mine = error.mine if isinstance(error, CollectiveError) else find_launcher(os.environ).speaks_first
        sys.exit(_report(error, shown=True) if mine else EXIT_OK)
    except UserError as error:
        sys.exit(_report(error, shown=True))
    except Exception as error:
        logs.report(_failure(error, f"a rank on {socket.gethostname()}"))
        _abort_all()
    logs.start(world.rank, log_format)  # a world may number its ranks in another way than the launcher
    return world


def _abort_all() -> NoReturn:
    """End all ranks where there is no world yet: those that MPI has brought together would wait for this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(EXIT_FAILURE)
    os._exit(EXIT_FAILURE)  # the launcher sees the status and ends the others


def _lost_another_rank(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _PEER_IS_GONE)


def _can_be_done_without(error: Exception) -> bool:
    """Under Horovod elastic any failed collective may be another rank's end: NCCL and timeouts have words of their own.

    But ranks that ask for different things would do so again.
    """
    from horovod.common.exceptions import HorovodInternalError

    return isinstance(error, HorovodInternalError) and "ismatched" not in str(error)


def _failure(error: Exception, where: str) -> str:
    """What to say of a rank that failed. One that has only noticed that another is gone has no traceback to show."""
    if _lost_another_rank(error):
        return f"{where} lost another rank: {str(error).splitlines()[0]}"
    return f"{where} failed:\n{traceback.format_exc()}"


def _report(error: UserError, shown: bool) -> int:
    if shown:
        logs.report(f"hvd_bert: {error}")
    return EXIT_BAD_INPUT
