"""`--per_device_train_batch_size auto`: find how many of the longest windows fit into the memory of every rank."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import numpy as np
import torch

from hvd_bert import machine
from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.config.parser import AUTO
from hvd_bert.config.settings import FLAGS
from hvd_bert.config.training import TrainArguments
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError, log
from hvd_bert.model.precision import autocast, recompute_layers
from hvd_bert.monitoring.usage import memory_now, memory_peak, reset_memory_peak
from hvd_bert.storage.reading import GIB
from hvd_bert.tasks.base import Task, make_plan

USABLE = {"cuda": 0.9, "cpu": 0.8}  # usable share of the free memory; on CPUs, other processes may need more of it
ENOUGH = 256 << 20  # on CPUs, stop after a doubling that added this many bytes: larger batches take long to measure


def choose(task: Task, args: TrainArguments, resume_point: ResumePoint | None, world: World) -> int | None:
    """Return the batch size per device for `auto`: the checkpoint's, or the largest that fits. A collective.

    Replaces the task's batch plan by one with this batch size. Returns None if the flag is a number, and the flag's
    default without training. `resume_point`: needed on rank 0 only. Raises CollectiveError if a rank has too little
    memory for a single window.
    """
    if args.per_device_train_batch_size != AUTO:
        return None
    if task.plan is None:
        return int(FLAGS["per_device_train_batch_size"].default)
    saved = max(1, int(resume_point.state["rank_batch"]) // args.gradient_accumulation_steps) if resume_point else None
    number: int | None = world.broadcast(saved)
    if number is None:
        with world.raise_on_all_ranks():
            fits = _largest(task, args, world)
        number = min(world.allgather(fits))
        log.info("--per_device_train_batch_size auto: %d windows fit into the memory of every rank", number)
    plan, chosen = task.plan, replace(args, per_device_train_batch_size=number)
    task.plan = make_plan(plan.lengths, chosen, plan.crossover, world, plan.mixture)
    return number


def _free_memory(world: World) -> int:
    """Return the free memory of this rank's GPU, or its share of the host's free memory, in bytes."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0]
    free = machine.free_memory() // len(world.host_ranks)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc retains freed memory, which would hide how much a batch allocates
        libc.malloc_trim(0)
    return free


def _largest(task: Task, args: TrainArguments, world: World) -> int:
    """Return how many of the longest windows fit on this rank, up to the largest possible micro-batch.

    Raises UserError if not even one fits.
    """
    plan, device = task.plan, world.device
    assert plan is not None
    if args.gradient_checkpointing:
        recompute_layers(task.model)
    free = _free_memory(world)
    # Reserve memory for optimizer state, averaged weights, communication buffers and, on CPUs, rank 0's checkpoint copy
    # (docs/guides/memory.md).
    gradients = 4 * sum(weight.numel() for weight in task.model.parameters() if weight.requires_grad)
    usable = USABLE[device.type] * free - gradients * (3 + bool(args.ema_decay) + 3 * (device.type == "cpu"))
    longest, at_start = np.argsort(-plan.lengths, kind="stable"), memory_now(device)

    def needed(count: int) -> float:
        """Measure the bytes that a micro-batch of the `count` longest windows needs; infinite if memory runs out."""
        reset_memory_peak(device)
        try:
            batch = task.batch(longest[:count])
            with autocast(device, args.precision):
                loss = task.losses(task.model, batch)[: batch.num_windows].sum()
            loss.backward()
            return memory_peak(device) - at_start
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            task.model.zero_grad()

    task.model.train()
    most = plan.num_windows // (world.size * args.gradient_accumulation_steps)
    if args.global_batch > 0:
        most = min(most, math.ceil(args.global_batch / (world.size * args.gradient_accumulation_steps)))
    count, need, growth = 1, needed(1), 0.0
    if need > usable:
        raise UserError(
            f"--per_device_train_batch_size auto: {free / GIB:.2f} GiB of free memory are too few for one window of"
            f" {plan.lengths.max()} tokens. Free some, lower --max_seq_length, or add --gradient_checkpointing."
        )
    per_window = max(need - gradients, 1.0)
    while 2 * count <= most and need + count * per_window <= usable and (device.type == "cuda" or growth < ENOUGH):
        twice = needed(2 * count)
        if twice > usable:
            return count
        growth, count, need = twice - need, 2 * count, twice
        per_window = max(2 * growth / count, 1.0)
    fits = max(count, min(most, count + int((usable - need) / per_window)))
    while device.type == "cuda" and fits > count and needed(fits) > usable:
        fits = max(count, fits * 7 // 8)
    return fits
