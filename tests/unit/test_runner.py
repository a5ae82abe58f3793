"""The end of a rank's process, for each outcome of its entry."""

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
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_INTERRUPTED


def leave(monkeypatch: pytest.MonkeyPatch, world: World, entry) -> int | str | None:
    monkeypatch.setattr(module, "join", lambda strategy, process: world)
    monkeypatch.setattr(world, "set_up_device", lambda: None)
    monkeypatch.setattr(atexit, "register", lambda *_: None)  # it would end pytest's process, too
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
    """Then horovod.torch prints a warning, and has no function."""
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


SHAPES, CLOSED = "Mismatched allreduce tensor shapes", "Connection closed by peer"


@pytest.mark.parametrize(
    ("elastic", "error", "status", "said"),
    [
        (False, CollectiveError("diverged", status=EXIT_FAILURE), EXIT_FAILURE, "hvd_bert: diverged\n"),
        (False, KeyboardInterrupt(), f"aborted {EXIT_INTERRUPTED}", "hvd_bert: interrupted\n"),
        (True, HorovodInternalError(SHAPES), f"aborted {EXIT_FAILURE}", SHAPES),  # a defect of its own
        (False, SystemExit(0), f"aborted {EXIT_FAILURE}", "sys.exit(0)"),
        (False, HorovodInternalError(CLOSED), f"aborted {EXIT_FAILURE}", f"lost another rank: {CLOSED}\n"),
    ],
)
def test_status_and_message_of_an_error(monkeypatch, capsys, elastic, error, status, said):
    world = make_world()
    world.elastic = elastic
    assert leave(monkeypatch, world, raising(error)) == status
    assert said in capsys.readouterr().err


def test_ranks_without_a_launcher_each_have_the_status(monkeypatch):
    """With torch's variables no launcher sees the status of another rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for error in (LaunchError("no world"), CollectiveError("no world", mine=False)):
        monkeypatch.setattr(module, "join", lambda strategy, process, error=error: raising(error)(make_world()))
        with pytest.raises(SystemExit) as left:
            run_as_rank(lambda world: None)
        assert left.value.code == EXIT_BAD_INPUT


def test_error_of_all_ranks_is_raised_in_a_thread(monkeypatch):
    """sys.exit would end only the thread, in silence."""
    error = CollectiveError("all know it")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(module, "join", lambda strategy, process: raising(error)(make_world()))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run_in_program, raising(error)).exception() is error
