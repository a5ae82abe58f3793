"""The training state: everything that the next step depends on, so that a run can resume exactly.

Per-rank state (random generators, sums since the last log line) is gathered; the rest is equal on all ranks. The batch
plan is a function of the seed, the step and the global batch, so a resumed run need not skip through earlier batches.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvd_bert.checkpoint.files import Contents
from hvd_bert.checkpoint.schedule import Best
from hvd_bert.config.settings import ParallelArguments
from hvd_bert.config.training import TrainArguments
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.model.precision import recompute_layers
from hvd_bert.strategies.base import Strategy, StrategyOptions, strategy_class
from hvd_bert.training.meter import Meter
from hvd_bert.training.optim import WeightAverage, layer_depths, make_optimizer, make_schedule, warmup_steps

Tensors = dict[str, Tensor]
Buffers = defaultdict[str, Tensors]  # CPU memory for copies of tensors, by file stem and tensor name
StrategyState = tuple[Tensors, Tensors, dict[str, Any]]  # the result of `Strategy.state`
Sums = list[list[float]]  # the result of `Meter.since_last_log` on each rank


def copy_to_host(tensors: Tensors, memory: Tensors) -> Tensors:
    """Copy tensors to the CPU into `memory`, which later calls reuse, since allocating takes longer than copying."""
    for name, tensor in tensors.items():
        if name not in memory:
            memory[name] = _host_memory(tensor)
    # Non-blocking copies into pinned memory, with one wait at the end, use the whole bandwidth of the bus.
    copies = {name: memory[name].copy_(tensor.detach(), non_blocking=True) for name, tensor in tensors.items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def _host_memory(tensor: Tensor) -> Tensor:
    """Allocate CPU memory for a copy of `tensor`. For a GPU tensor, pin it if possible, to copy faster."""
    if tensor.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


@dataclass
class TrainState:
    """Everything that training changes."""

    strategy: Strategy
    schedule: Any
    meter: Meter
    plan: BatchPlan
    world: World
    best: Best
    average: WeightAverage | None = None  # moving average of the weights (EMA)
    buffers: Buffers = field(default_factory=lambda: defaultdict(dict))
    step: int = 0
    eval_pending: bool = False  # the evaluation due after this step has not run

    @staticmethod
    def fresh(
        model: nn.Module, plan: BatchPlan, best: Best, args: TrainArguments, parallel: ParallelArguments, world: World
    ) -> TrainState:
        """Create the state before the first step, with rank 0's weights on all ranks. A collective.

        Also seeds this process's random generators.
        """
        with world.raise_on_all_ranks():
            if args.gradient_checkpointing:
                recompute_layers(model)
            if args.layerwise_lr_decay < 1:
                layer_depths(model)  # raises if the model has no list of layers
        strategy = strategy_class(parallel.strategy)(
            model,
            lambda module: make_optimizer(module, args, world.size * world.devices),
            StrategyOptions(args, parallel, plan.accumulation),
            world,
        )
        schedule = make_schedule(strategy.optimizer, args, args.total_steps(plan.steps_per_epoch))
        seed_ranks(args.seed, 0, world)
        meter = Meter(world, strategy.separates_comm)
        meter.on_applied = schedule.step
        average = WeightAverage(model, args.ema_decay) if args.ema_decay else None
        return TrainState(strategy, schedule, meter, plan, world, best, average)

    def effective_settings(self, args: TrainArguments) -> dict[str, float]:
        """Return the world size, the data's size and the values derived from them, such as the peak learning rate."""
        total_steps = args.total_steps(self.plan.steps_per_epoch)
        return {
            "world_size": self.world.size,
            "global_batch": self.plan.global_batch,
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "learning_rate": self.schedule.base_lrs[0],  # the peak of the schedule
            "warmup_steps": warmup_steps(args, total_steps),
            "train_steps": total_steps,
            "steps_per_epoch": self.plan.steps_per_epoch,
            "train_windows": self.plan.num_windows,
        }

    def averaged(self) -> AbstractContextManager[None]:
        """Context manager: with --ema_decay, the model holds the weights' averages inside the block."""
        return self.average.applied() if self.average else nullcontext()

    def snapshot(self) -> Contents | None:
        """Return a checkpoint's content on rank 0, None on other ranks. A collective.

        The next snapshot overwrites its tensors.
        """
        mine = random_numbers(self.world.gpus), self.meter.since_last_log(), self.meter.joules()
        ranks = self.world.gather(mine)
        strategy = self.strategy.state()
        if self.world.rank != 0:
            return None
        rng = {f"rank{rank}.{name}": value for rank, (rng, *_) in enumerate(ranks) for name, value in rng.items()}
        joules = sum(joules for *_, joules in ranks)
        return self._contents(strategy, self.buffers, rng, [sums for _, sums, _ in ranks], joules)

    def local_snapshot(self) -> Contents:
        """Return the state after the last finished step, without random generators. Not a collective.

        Its sums since the last log line have the loss of this rank only. They count the windows and tokens of all
        ranks, according to the plan; positions are extrapolated from this rank's padding.
        """
        loss, _, tokens, positions = self.meter.since_last_log()  # first, since it advances the schedule
        steps = [self.plan.step_windows(step) for step in range(self.meter.last_step, self.step)]
        all_tokens = sum(int(self.plan.lengths[ids].sum(dtype=np.int64)) for ids in steps)
        sums = [loss, sum(map(len, steps)), all_tokens, round(all_tokens * (positions / tokens if tokens else 1))]
        return self._contents(self.strategy.state(), defaultdict(dict), {}, [sums])

    def _contents(
        self, strategy: StrategyState, buffers: Buffers, rng: Tensors, sums: Sums, joules: float = math.nan
    ) -> Contents:
        """Make a checkpoint's content. `rng`: the ranks' generator states. `joules`: see `Meter.state`."""
        weights, optimizer, rest = strategy
        tensors = {
            "model": copy_to_host(weights, buffers["model"]),
            "optimizer": copy_to_host(optimizer, buffers["optimizer"]),
            "rng": rng,
        }
        if self.average:  # "model" must be what evaluations use: the averages
            tensors["unaveraged"] = tensors["model"]
            with self.averaged():
                tensors["model"] = copy_to_host(dict(self.strategy.model.state_dict()), buffers["average"])
        state = {
            "step": self.step,
            "epoch": self.step / self.plan.steps_per_epoch,
            "world_size": len(sums),
            "global_batch": self.plan.global_batch,
            "accumulation": self.plan.accumulation,
            "strategy": rest,
            "schedule": {name: value for name, value in self.schedule.state_dict().items() if name != "lr_lambdas"},
            "meter": self.meter.state(joules),
            "since_last_look": sums,
            "best": self.best.state(),
            "eval_pending": self.eval_pending,
        }
        return Contents(tensors, state)

    def restore(self, contents: Contents, seed: int, root: int = 0) -> None:
        """Restore a snapshot that rank `root` broadcasts; other ranks may pass an empty snapshot. A collective.

        If the snapshot has no generator states for this world size, the generators are seeded by `seed`, rank and step.
        """
        world = self.world
        rest, tensors = world.broadcast(contents.state, root), broadcast_groups(contents.tensors, world, root)
        self.strategy.load_state(tensors.get("unaveraged", tensors["model"]), tensors["optimizer"], rest["strategy"])
        if self.average:
            with self.averaged():
                self.strategy.model.load_state_dict(tensors["model"])
        self.schedule.load_state_dict({**self.schedule.state_dict(), **rest["schedule"]})
        self.step = rest["step"]
        self.best = Best(**{**rest["best"], "metric": self.best.metric, "mode": self.best.mode})
        self.eval_pending = rest["eval_pending"]
        seed_ranks(seed, self.step, world)  # for generators whose states the checkpoint lacks
        if rest["world_size"] == world.size and tensors["rng"]:
            with world.raise_on_all_ranks():
                set_random_numbers(_rank_tensors(world.rank, tensors["rng"]), world.gpus)
        self.meter.restore(rest["meter"], sums_of_rank(world.rank, world.size, rest["since_last_look"]), self.step)


def sums_of_rank(rank: int, size: int, saved: Sums) -> list[float]:
    """Return the sums with which `rank` resumes: its own or, if the world size changed, the total on rank 0."""
    if len(saved) == size:
        return saved[rank]
    if rank != 0:
        return [0, 0, 0, 0]
    loss, *counts = map(sum, zip(*saved, strict=True))
    return [loss * size / len(saved), *counts]  # `Meter.read` divides the loss by the world size


def broadcast_groups(groups: dict[str, Tensors], world: World, root: int) -> dict[str, Tensors]:
    """Copy the tensors of rank `root` to the CPU of every rank. Returns them by group and name. A collective."""
    shapes = {group: {name: (t.shape, t.dtype) for name, t in tensors.items()} for group, tensors in groups.items()}
    shapes = world.broadcast(shapes, root)
    if world.rank != root:
        groups = {
            group: {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensors.items()}
            for group, tensors in shapes.items()
        }
    for tensors in groups.values():
        world.broadcast_tensors(tensors, root)
    return groups


def seed_ranks(seed: int, step: int, world: World) -> None:
    """Seed this rank's random generators by a hash of seed, rank and step, so that dropout differs between ranks.

    With `seed + rank` instead, rank 1 would draw the same numbers as rank 0 of a run with seed + 1.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(world.rank, step))
    number, *others = sequence.generate_state(world.devices, np.uint64).tolist()
    random.seed(number)
    np.random.seed(sequence.generate_state(4))
    torch.manual_seed(number)  # also seeds all GPUs
    for gpu, other in zip(world.gpus[1:], others, strict=True):
        with torch.cuda.device(gpu):
            torch.cuda.manual_seed(other)


def random_numbers(gpus: Sequence[torch.device]) -> dict[str, Tensor]:
    """Return the states of this process's random generators: those of torch, CUDA, NumPy and Python."""
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.append(np.asarray(key, dtype=np.int64), [position, has_gauss])),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "gauss": torch.tensor([gauss, float("nan") if next_gauss is None else next_gauss], dtype=torch.float64),
    }
    return state | {name: torch.cuda.get_rng_state(gpu) for name, gpu in _named_gpus(gpus)}


def _rank_tensors(rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    start = f"rank{rank}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def _named_gpus(gpus: Sequence[torch.device]) -> Iterator[tuple[str, torch.device]]:
    """Pair the rank's GPUs with the names of their generators in a checkpoint: cuda, cuda1, ..."""
    return ((f"cuda{number or ''}", gpu) for number, gpu in enumerate(gpus))


def set_random_numbers(state: dict[str, Tensor], gpus: Sequence[torch.device]) -> None:
    """Restore the generator states of `random_numbers`. Raises UserError if they are damaged."""
    try:
        *key, position, has_gauss = state["numpy"].tolist()
        gauss, next_gauss = state["gauss"].tolist()
        version, *words = state["python"].tolist()
        torch.set_rng_state(state["torch"])
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, has_gauss, gauss))
        random.setstate((version, tuple(words), next_gauss if next_gauss == next_gauss else None))
        for name, gpu in _named_gpus(gpus):
            if name in state:
                torch.cuda.set_rng_state(state[name], gpu)
    except (LookupError, OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"The checkpoint's random numbers cannot be restored: {error}.") from error
