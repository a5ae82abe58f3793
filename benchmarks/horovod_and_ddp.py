"""A step averaged by Horovod beside the same step by torch's DistributedDataParallel: the ratio of their times.

    horovodrun -np 2 python benchmarks/horovod_and_ddp.py --model MODEL --steps 30

Two copies of one model in the same processes take turns, on the same windows, with the same loss, clipping and fused
AdamW; which goes first alternates. DDP as its documentation recommends it: Gloo on CPUs, NCCL on GPUs, gradients as
views of its buckets. The losses must agree, or nothing is printed. Prints the median over the pairs, and their range.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from hvd_bert.allocator import keep_memory
from hvd_bert.bench.__main__ import parse
from hvd_bert.bench.workload import random_inputs
from hvd_bert.config import Config
from hvd_bert.data.batches import Batch, Collator
from hvd_bert.engines.horovod import HorovodEngine
from hvd_bert.inputs import Inputs
from hvd_bert.model import autocast, window_losses
from hvd_bert.optim import make_optimizer
from hvd_bert.output import facts
from hvd_bert.running import run_as_rank
from hvd_bert.state import seed_ranks
from hvd_bert.world import World

WARM_UP = 4  # pairs
Step = Callable[[Batch, int], float]


def horovod_step(inputs: Inputs, config: Config, world: World) -> Step:
    """One optimizer step by this trainer's engine."""
    engine = HorovodEngine(inputs.model, make_optimizer(inputs.model, config.train, world.size), 1, config, world)

    def step(batch: Batch, windows: int) -> float:
        with autocast(world.device, config.train.precision):
            loss = window_losses(inputs.model, batch).sum() * (world.size / windows)
        engine.backward(loss)
        engine.synchronize()
        engine.clip()
        engine.step()
        return float(loss.detach())

    return step


def ddp_step(inputs: Inputs, config: Config, world: World) -> Step:
    """The same step by DDP."""
    with socket.socket() as free:
        free.bind(("", 0))
        address = world.broadcast(f"tcp://{socket.gethostname()}:{free.getsockname()[1]}")
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=address, rank=world.rank, world_size=world.size)
    devices = [world.device] if world.device.type == "cuda" else None
    model = DistributedDataParallel(copy.deepcopy(inputs.model), device_ids=devices, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, config.train, world.size)

    def step(batch: Batch, windows: int) -> float:
        with autocast(world.device, config.train.precision):
            loss = window_losses(model, batch).sum() * (world.size / windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def main(world: World) -> None:
    """Measure, print on rank 0."""
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--out")
    chosen, words = chooser.parse_known_args()
    with world.together():
        flags, config = parse(words, show_help=world.rank == 0)
    if world.device.type == "cpu":
        keep_memory()
    rank_batch = config.train.per_device_train_batch_size * world.size
    inputs = random_inputs(flags.model, rank_batch * (flags.steps + WARM_UP), config, world)
    inputs.model.to(device=world.device).train()
    assert inputs.train is not None
    ddp = ddp_step(inputs, config, world)  # before the other hooks the gradients of the model that it copies
    steps = {"horovod": horovod_step(inputs, config, world), "ddp": ddp}
    plan, collate = inputs.train.plan, Collator(inputs.train.windows, world.device, config.data.pad_to)
    pairs: list[dict[str, float]] = []
    for number in range(flags.steps + WARM_UP):
        batch = collate(plan.rank_windows(number, world.rank)[0])
        seconds, losses = {}, {}
        for name in sorted(steps, reverse=bool(number % 2)):
            seed_ranks(number, 0, world)  # the same dropout for both
            world.allgather(None)
            start = time.perf_counter()
            losses[name] = steps[name](batch, len(plan.step_windows(number)))
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name] = max(world.allgather(time.perf_counter() - start))
        if abs(losses["horovod"] - losses["ddp"]) > 1e-3 * abs(losses["ddp"]):
            raise SystemExit(f"step {number}: the losses differ: {losses}")
        pairs.append(seconds)
    timed = pairs[WARM_UP:]
    ratios = sorted(pair["horovod"] / pair["ddp"] for pair in timed)
    distributed.destroy_process_group()
    if world.rank != 0:
        return
    low, _, high = quantiles(ratios, n=4)
    figures = {
        **{f"{name}_s": median(pair[name] for pair in timed) for name in steps},
        "horovod_over_ddp": {"median": median(ratios), "quartiles": [low, high], "range": [ratios[0], ratios[-1]]},
        "pairs": len(timed),
    }
    print(json.dumps(figures, indent=1))
    if chosen.out:
        with open(chosen.out, "w", encoding="utf-8") as file:
            json.dump({"command": sys.argv[1:], **figures, **facts(config, world)}, file, indent=1)


if __name__ == "__main__":
    run_as_rank(main)
