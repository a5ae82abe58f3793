"""Which kind of world a process joins."""

from __future__ import annotations

import os

import torch

from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.launch import WorldsOfOne, find_launcher, is_elastic
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError


def join(strategy: str = "horovod", generation: int = 0) -> World:
    """Join the world that the launcher made, for a strategy of `settings.STRATEGIES`. Raises UserError where it cannot.

    `generation`: how many worlds this process has been in before, under Horovod elastic.
    """
    if strategy == "horovod":
        return HorovodWorld.join(generation)
    if strategy in ("none", "dp"):
        return _alone(strategy)
    from hvd_bert.distributed.torch_world import DistributedWorld  # torch's part, which Horovod's runs need not load

    return DistributedWorld.join()


def _alone(strategy: str) -> World:
    launcher = find_launcher(os.environ)
    if (launcher.size or 1) > 1:
        raise WorldsOfOne(
            f"--strategy {strategy} is one process, but {launcher.name} started {launcher.size}: start it without a"
            " launcher, or choose another strategy."
        )
    world = World()
    world.elastic = is_elastic(os.environ)  # to be refused: only Horovod is
    if strategy == "dp":
        world.devices = torch.cuda.device_count()
        if world.devices < 2:
            raise UserError(
                f"--strategy dp drives several GPUs from one process, and {world.devices} are visible here: take"
                " --strategy none, or horovod with one rank per GPU."
            )
    return world
