"""A step averaged by Horovod beside the same step by torch's DistributedDataParallel: the ratio of their times.

    python benchmarks/horovod_and_ddp.py --ranks 2 --rounds 4 -- --model MODEL --steps 16

After `--` come flags of `python -m hvd_bert.bench`. The two take turns, each in processes of its own, on the same
windows, with the same model, loss, clipping, fused AdamW and threads. DDP as its documentation recommends it: Gloo on
CPUs, NCCL on GPUs, gradients as views of its buckets; Horovod has left its processes by then. The losses must agree,
or nothing is printed. Prints the ratio of the medians of a round's steps: the median over the rounds, and the range.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from hvd_bert.bench.__main__ import parse
from hvd_bert.bench.workload import random_inputs
from hvd_bert.config import Config
from hvd_bert.data.batches import Batch, Collator
from hvd_bert.engines.horovod import HorovodEngine
from hvd_bert.errors import UserError
from hvd_bert.inputs import Inputs
from hvd_bert.model import autocast, window_losses
from hvd_bert.optim import make_optimizer
from hvd_bert.running import run_as_rank
from hvd_bert.state import seed_ranks
from hvd_bert.train import set_up
from hvd_bert.world import World

REPOSITORY = Path(__file__).resolve().parents[1]
WARM_UP = 4  # steps
LEAST_AGREEMENT = 1e-3  # of the losses, relative
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
    """The same step by DDP; Horovod's world, and the thread behind it, end here."""
    with socket.socket() as free:
        free.bind(("", 0))
        address = world.broadcast(f"tcp://{socket.gethostname()}:{free.getsockname()[1]}")
    world.leave()
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=address, rank=world.rank, world_size=world.size)
    devices = [world.device] if world.device.type == "cuda" else None
    model = DistributedDataParallel(inputs.model, device_ids=devices, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, config.train, world.size)

    def step(batch: Batch, windows: int) -> float:
        with autocast(world.device, config.train.precision):
            loss = window_losses(model, batch).sum() * (world.size / windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(world: World) -> None:
    """One side, on all ranks: HVD_AND_DDP says which, and where rank 0 is to leave the steps' times and losses."""
    side, out = os.environ["HVD_AND_DDP"].split(":", 1)
    with world.together():
        flags, config = parse(sys.argv[1:], show_help=False)
        if config.train.gradient_accumulation_steps != 1:
            raise UserError("--gradient_accumulation_steps: this benchmark compares steps of one pass.")
    set_up(config, world)
    rank_batch = config.train.per_device_train_batch_size * world.size
    inputs = random_inputs(flags.model, rank_batch * (flags.steps + WARM_UP), config, world)
    inputs.model.to(device=world.device).train()
    assert inputs.train is not None
    plan, collate = inputs.train.plan, Collator(inputs.train.windows, world.device, config.data.pad_to)
    step = {"horovod": horovod_step, "ddp": ddp_step}[side](inputs, config, world)
    seconds, losses = [], []
    for number in range(flags.steps + WARM_UP):
        batch = collate(plan.rank_windows(number, world.rank)[0])
        seed_ranks(number, 0, world)  # the same dropout on both sides
        start = time.perf_counter()
        losses.append(step(batch, len(plan.step_windows(number))))  # which waits for the device
        seconds.append(time.perf_counter() - start)
    if world.rank == 0:
        Path(out).write_text(json.dumps({"seconds": seconds[WARM_UP:], "losses": losses}))
    if side == "ddp":
        distributed.destroy_process_group()


def one_round(side: str, ranks: int, threads: int, flags: list[str], out: Path) -> dict[str, list[float]]:
    """Run one side; its steps' seconds and rank 0's losses."""
    env = os.environ | {"HVD_AND_DDP": f"{side}:{out}", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPOSITORY)}
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "--mpi", "-np", str(ranks), sys.executable]
    subprocess.run([*launcher, __file__, *flags], env=env, check=True, stdout=sys.stderr)
    record: dict[str, list[float]] = json.loads(out.read_text())
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Horovod's step over DDP's.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("flags", nargs="*", help="of python -m hvd_bert.bench")
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            sides = {}
            for side in ("horovod", "ddp") if number % 2 == 0 else ("ddp", "horovod"):
                sides[side] = one_round(side, args.ranks, args.threads, args.flags, Path(folder) / "steps.json")
            for ours, theirs in zip(sides["horovod"]["losses"], sides["ddp"]["losses"], strict=True):
                if abs(ours - theirs) > LEAST_AGREEMENT * abs(theirs):
                    raise SystemExit(f"The losses differ: {ours} and {theirs}. Nothing is compared.")
            rounds.append({f"{side}_s": median(sides[side]["seconds"]) for side in sides})
            print(rounds[-1], file=sys.stderr)
    ratios = sorted(each["horovod_s"] / each["ddp_s"] for each in rounds)
    ratio = {"median": median(ratios), "range": [ratios[0], ratios[-1]]}
    print(json.dumps({"rounds": rounds, "horovod_over_ddp": ratio}, indent=1))


if __name__ == "__main__":
    run_as_rank(measure) if "HVD_AND_DDP" in os.environ else main()
