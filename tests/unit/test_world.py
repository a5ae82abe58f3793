"""The world: how all ranks agree on an error, where they sit, and how a command leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_bert import launch
from hvd_bert import world as module
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, UserError
from hvd_bert.launch import Place, WorldsOfOne
from hvd_bert.world import AgreedError, World, run_as_rank


def make_world(rank: int = 0, size: int = 1) -> World:
    """A world whose collectives are not there; `size` > 1: see `heard`."""
    numbers = {"rank": rank, "size": size, "local_rank": rank, "local_size": size, "cross_rank": 0, "cross_size": 1}
    hvd = SimpleNamespace(**{name: lambda value=value: value for name, value in numbers.items()}, shutdown=lambda: None)
    return World(hvd, "none", None)


def heard(world: World, messages: list[str | None]) -> World:
    """Let the world's other ranks say `messages` in `together`; this rank says its own."""

    def allgather(mine):
        return [mine if rank == world.rank else said for rank, said in enumerate(messages)]

    world.allgather = allgather  # type: ignore[method-assign]
    return world


def test_world_of_one_needs_no_collective():
    world = make_world()
    assert world.allgather("x") == ["x"]
    assert world.broadcast("x") == "x"
    values = torch.tensor([1.0, 2.0])
    assert torch.equal(world.sum(values), values)
    with world.together():
        pass
    with pytest.raises(AgreedError, match=r"^no such file$"), world.together():
        raise UserError("no such file")


def test_error_of_one_rank_becomes_an_error_of_all():
    world = heard(make_world(rank=0, size=3), [None, "disk is full", None])
    with pytest.raises(AgreedError, match=r"^rank 1 on its host: disk is full$") as agreed, world.together():
        pass
    assert agreed.value.rank == 1


def test_error_of_all_ranks_is_said_by_the_first():
    world = heard(make_world(rank=2, size=3), ["bad flag"] * 3)
    with pytest.raises(AgreedError, match=r"^bad flag$") as agreed, world.together():
        raise UserError("bad flag")
    assert agreed.value.rank == 0


def test_defects_are_no_user_errors():
    with pytest.raises(ZeroDivisionError), make_world().together():
        _ = 1 / 0


def on_hosts(*hosts: str) -> tuple[Place, ...]:
    return tuple(Place(rank, host, 0, "device", None, frozenset({0})) for rank, host in enumerate(hosts))


def test_places_for_the_log(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    world = make_world(size=3)
    world.places = on_hosts("b", "a", "b")
    threads = f"{torch.get_num_threads()} thread(s) per rank"
    assert world.describe()[1:] == [f"b: rank 0 device, rank 2 device; {threads}", f"a: rank 1 device; {threads}"]
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert world.describe()[1].startswith("Slurm job id 17")


def test_hosts_in_rank_order():
    world = make_world()
    world.places = on_hosts("b", "b", "a", "b")
    assert world.hosts == ["b", "a"]


def leave(monkeypatch: pytest.MonkeyPatch, world: World, entry) -> int | str | None:
    monkeypatch.setattr(module.World, "join", staticmethod(lambda: world))
    monkeypatch.setattr(world, "take_place", lambda: None)
    monkeypatch.setattr(module.os, "_exit", lambda status: (_ for _ in ()).throw(SystemExit(f"aborted {status}")))
    with pytest.raises(SystemExit) as left:
        run_as_rank(entry)
    return left.value.code


def raising(error: BaseException):
    def entry(world: World) -> None:
        raise error

    return entry


@pytest.mark.parametrize(
    ("entry", "status", "said"),
    [
        (lambda world: None, EXIT_OK, ""),
        (raising(AgreedError("no such file")), EXIT_BAD_INPUT, "hvd_bert: no such file\n"),
        (raising(AgreedError("diverged", status=EXIT_FAILURE)), EXIT_FAILURE, "hvd_bert: diverged\n"),
        (raising(AgreedError("rank 1 says it", rank=1)), EXIT_BAD_INPUT, ""),
    ],
    ids=["done", "bad input", "failure", "another rank speaks"],
)
def test_ranks_that_agree_leave_in_order(monkeypatch, capsys, entry, status, said):
    assert leave(monkeypatch, make_world(), entry) == status
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("only here"), EXIT_BAD_INPUT, "hvd_bert: rank 0 on {host}: only here\n"),
        (KeyError("defect"), EXIT_FAILURE, "rank 0 on {host} failed:\nTraceback"),
        (KeyboardInterrupt(), EXIT_FAILURE, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rank_that_fails_alone_ends_all(monkeypatch, capsys, error, status, said):
    world = make_world()
    assert leave(monkeypatch, world, raising(error)) == f"aborted {status}"
    assert capsys.readouterr().err.startswith(said.format(host=world.host))


@pytest.mark.parametrize(("rank", "status"), [(None, EXIT_BAD_INPUT), (0, EXIT_BAD_INPUT), (3, EXIT_OK)])
def test_no_world_to_join_is_said_by_the_first(monkeypatch, capsys, rank, status):
    def start():
        raise WorldsOfOne("no world")

    for _, *names in launch._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    if rank is not None:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(module.World, "join", staticmethod(start))
    with pytest.raises(SystemExit) as left:
        run_as_rank(lambda world: None)
    assert left.value.code == status
    assert capsys.readouterr().err == ("hvd_bert: no world\n" if status else "")
