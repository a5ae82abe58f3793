"""Exit status and message of a rank's process, for each outcome of its entry point."""

from __future__ import annotations

import atexit
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import horovod.torch
import pytest
from horovod.common.exceptions import HorovodInternalError
from refusals import refused
from test_world import make_world

from hvd_bert.distributed import runner as module
from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.launch import LaunchError
from hvd_bert.distributed.runner import run_as_rank, run_in_program
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, UserError


def leave(monkeypatch: pytest.MonkeyPatch, world: World, entry) -> int | str | None:
    monkeypatch.setattr(module, "join", lambda strategy, process: world)
    monkeypatch.setattr(world, "set_up_device", lambda: None)
    monkeypatch.setattr(atexit, "register", lambda *_: None)  # the registered function would end pytest
    monkeypatch.setattr(module.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(f"aborted {status}")))
    with pytest.raises(SystemExit) as left:
        run_as_rank(entry)
    return left.value.code


def test_without_horovod_other_strategies_are_named(monkeypatch):
    for name in ("horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        monkeypatch.setenv(name, "gloo")
    with refused("horovod", "--strategy ddp", "torchrun"):
        HorovodWorld.join()


def test_horovod_without_its_library(monkeypatch):
    """If its library is missing, importing horovod.torch only prints a warning and defines no functions."""
    cut = ModuleType("horovod.torch")
    cut.__path__ = []
    monkeypatch.setattr(horovod, "torch", cut)
    monkeypatch.setitem(sys.modules, "horovod.torch", cut)
    monkeypatch.delitem(sys.modules, "horovod.torch.mpi_ops")
    with refused("horovod.torch", "env/setup.sh"):
        HorovodWorld.join()


def raising(error: BaseException):
    def entry(world: World) -> None:
        raise error

    return entry


TORCH_RANK_1 = {"WORLD_SIZE": "2", "RANK": "1"}
SHAPES, CLOSED = "Mismatched allreduce tensor shapes", "Connection closed by peer"


@pytest.mark.parametrize(
    ("elastic", "error", "status", "printed"),
    [
        (False, CollectiveError("diverged", status=EXIT_FAILURE), EXIT_FAILURE, "hvd_bert: diverged\n"),
        (False, KeyboardInterrupt(), f"aborted {EXIT_INTERRUPTED}", "hvd_bert: interrupted\n"),
        (True, HorovodInternalError(SHAPES), f"aborted {EXIT_FAILURE}", SHAPES),  # a bug, not a lost rank
        (False, SystemExit(0), f"aborted {EXIT_FAILURE}", "sys.exit(0)"),
        (False, HorovodInternalError(CLOSED), f"aborted {EXIT_FAILURE}", f"lost another rank: {CLOSED}\n"),
    ],
)
def test_status_and_message_of_an_error(monkeypatch, capsys, elastic, error, status, printed):
    world = make_world()
    world.elastic = elastic
    assert leave(monkeypatch, world, raising(error)) == status
    assert printed in capsys.readouterr().err


def horovodrun(rank: int, local_rank: int) -> dict[str, str]:
    return {"HOROVOD_SIZE": "4", "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(local_rank)}


@pytest.mark.parametrize(
    ("environ", "error", "status", "reports"),
    [
        (horovodrun(2, 0), UserError("no Horovod"), EXIT_BAD_INPUT, True),  # may fail on this host only
        # With a failure status, rank 3 would make horovodrun end rank 2 before its report.
        (horovodrun(3, 1), UserError("no Horovod"), EXIT_OK, False),
        (horovodrun(2, 0), LaunchError("no world"), EXIT_OK, False),
        # Without a launcher, nothing ends the other ranks, so each rank has a failure status of its own.
        (TORCH_RANK_1, UserError("no Horovod"), EXIT_BAD_INPUT, True),  # started by hand, perhaps alone on its host
        (TORCH_RANK_1, CollectiveError("no world", mine=False), EXIT_BAD_INPUT, False),
        (TORCH_RANK_1 | {"RANK": "2"}, UserError("RANK=2"), EXIT_BAD_INPUT, True),
        ({"LOCAL_RANK": "1"}, UserError("no Horovod"), EXIT_BAD_INPUT, True),  # a leftover variable, not a launcher's
    ],
)
def test_error_before_joining_is_reported_once(monkeypatch, capsys, environ, error, status, reports):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "watch_launcher", lambda is_watched: None)
    monkeypatch.setattr(module, "join", lambda strategy, process: raising(error)(make_world()))
    with pytest.raises(SystemExit) as left:
        run_as_rank(lambda world: None)
    assert (left.value.code, str(error) in capsys.readouterr().err) == (status, reports)


def test_error_of_all_ranks_is_raised_in_a_thread(monkeypatch):
    """In a thread the error must be raised: sys.exit would silently end only the thread."""
    error = CollectiveError("all know it")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(module, "join", lambda strategy, process: raising(error)(make_world()))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run_in_program, raising(error)).exception() is error
