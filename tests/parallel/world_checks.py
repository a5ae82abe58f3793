"""Checks of World: ranks, devices and collectives."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from ranks import Ranks, check, check_every_strategy

from hvd_bert.distributed.torch_world import DistributedWorld
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import UserError


@check_every_strategy
def ranks_join_again_once_their_devices_are_known(ranks: Ranks) -> None:
    """Join again as on GPUs, where the second time binds NCCL to the device."""
    if isinstance(ranks.world, DistributedWorld):
        ranks.world._join_again("gloo", None)


@check_every_strategy
def every_rank_has_its_rank_info(ranks: Ranks) -> None:
    world = ranks.world
    everyone = list(range(world.size))
    assert world.controller == ranks.controller
    assert world.allgather(world.rank) == everyone
    assert [info.rank for info in world.rank_infos] == everyone
    assert [info.local_rank for info in world.rank_infos] == everyone
    assert {info.host for info in world.rank_infos} == {world.host} == set(world.hosts)
    assert world.host_ranks == tuple(everyone)
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert world.cross_rank == 0
    assert str(world.device) == world.rank_infos[world.rank].device


@check
def waits_in_mpi_yield_the_core_on_cpus(ranks: Ranks) -> None:
    """Otherwise, Horovod's thread would take the core from the training.

    Open MPI reads the variable only at its start.
    """
    if ranks.controller == "mpi":
        assert os.environ["OMPI_MCA_mpi_yield_when_idle"] == "1"  # noqa: SIM112  # Open MPI's spelling


@check_every_strategy
def allgather_takes_values_of_different_types(ranks: Ranks) -> None:
    # Under Gloo, Horovod names an object's collective after the object's type. Without an explicit name, different
    # types hang.
    values = [{"a": 1}, None, "text", [1.5, (2,)]]
    world = ranks.world
    assert world.allgather(values[world.rank]) == values[: world.size]
    assert world.allgather(values[(world.rank + 1) % 4]) == [values[(rank + 1) % 4] for rank in range(world.size)]


@check_every_strategy
def broadcast_gives_one_ranks_value(ranks: Ranks) -> None:
    world = ranks.world
    for value, root in (({"from": 0}, 0), (None, 0), ("text", world.size - 1)):
        assert world.broadcast(value if world.rank == root else object, root) == value
        tensor = torch.tensor([float(world.rank)])
        world.broadcast_tensors({"tensor": tensor}, root)
        assert tensor.item() == root


@check_every_strategy
def sum_adds_up_over_the_ranks(ranks: Ranks) -> None:
    world = ranks.world
    mine = torch.tensor([1.0, world.rank, 1e-9 * world.rank], dtype=torch.float64)
    total = world.size * (world.size - 1) / 2
    expected = torch.tensor([world.size, total, 1e-9 * total], dtype=torch.float64)
    torch.testing.assert_close(world.sum(mine), expected, rtol=1e-14, atol=0)
    assert mine[0] == 1.0, "sum must not change the values given"


@check
def sums_of_a_shape_have_one_name(ranks: Ranks) -> None:
    """A new name per call would fill Horovod's response cache."""
    import horovod.torch as hvd

    world = ranks.world
    if world.size == 1:
        return
    with patch.object(hvd, "allreduce", wraps=hvd.allreduce) as allreduce:
        for length in (2, 3, 2, 3):
            assert world.sum(torch.ones(length)).tolist() == [world.size] * length
    names = [call.kwargs.get("name") for call in allreduce.call_args_list]
    assert all(names) and names[:2] == names[2:] and names[0] != names[1], names


@check_every_strategy
def error_of_one_rank_is_raised_on_all_ranks(ranks: Ranks) -> None:
    world = ranks.world
    last = world.size - 1
    with pytest.raises(CollectiveError) as caught, world.raise_on_all_ranks():
        if world.rank == last:
            raise UserError("no such file")
    assert caught.value.mine == (world.rank == last)
    assert str(caught.value) == ("no such file" if world.size == 1 else f"rank {last} on {world.host}: no such file")
    with pytest.raises(CollectiveError) as caught, world.raise_on_all_ranks():
        raise UserError("bad flag")
    assert (caught.value.mine, str(caught.value)) == (world.rank == 0, "bad flag")
