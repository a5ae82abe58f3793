"""Which kind of world a process joins."""

from __future__ import annotations

import os

import torch

from hvd_bert.distributed.horovod_world import HorovodWorld
from hvd_bert.distributed.launch import WorldsOfOne, find_launcher, is_elastic
from hvd_bert.distributed.slurm import requested_tasks
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import UserError


def join(strategy: str = "horovod", generation: int = 0) -> World:
    """Join the launcher's world, for a strategy of `settings.STRATEGIES`. Raises UserError if it cannot.

    `generation`: under Horovod elastic, how many worlds this process was in before.
    """
    if strategy in ("none", "dp"):
        return _alone(strategy)
    requested = requested_tasks(os.environ)
    world: World
    if strategy == "horovod":
        world = HorovodWorld.join(generation)
    else:
        from hvd_bert.distributed.torch_world import DistributedWorld  # Horovod's runs do not need it

        world = DistributedWorld.join()
    if world.size < requested and world.rank == 0 and not world.elastic:
        log.warning(
            "The job requested %s tasks, but only %s rank(s) run. Start all of them (`srun --mpi=pmix`, -np %s), or"
            " request fewer (sbatch --ntasks-per-node).",
            requested,
            world.size,
            requested,
        )
    return world


def _alone(strategy: str) -> World:
    launcher = find_launcher(os.environ)
    if (launcher.size or 1) > 1:
        raise WorldsOfOne(
            f"--strategy {strategy} runs in one process, but {launcher.name} started {launcher.size}. Start it without"
            " a launcher, or choose another strategy."
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
