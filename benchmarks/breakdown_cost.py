"""Measures the cost of the step breakdown: steps with all of its records over the same steps without them.

    python benchmarks/breakdown_cost.py --model MODEL
    horovodrun -np 2 python benchmarks/breakdown_cost.py --model MODEL

Trains on random windows of one length, so that all steps do the same work, in blocks of --block steps. Each pair has
one block with and one without laps, sums and the line of metrics at its end (its collective, its record on disk and for
TensorBoard); every second pair in reverse order. Other flags go to the trainer. Prints the ratio of a pair's blocks in
wall and CPU time (median, quartiles, range), and the time of each of these calls in some further blocks. On a busy
machine the calls are the more precise figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_bert.bench.workload import random_inputs, random_windows
from hvd_bert.config import command_line
from hvd_bert.config.settings import Config
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World
from hvd_bert.tasks.inputs import Inputs, TrainingSet
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.train.loop import Training
from hvd_bert.train.start import set_up
from hvd_bert.training.breakdown import Breakdown
from hvd_bert.training.meter import Meter
from hvd_bert.training.metrics_log import MetricsLogger
from hvd_bert.training.reporters.table import start

Method = Callable[..., Any]
Seconds = tuple[float, float]  # wall time, and CPU time of this process
OF_A_STEP = [(Meter, "lap"), (Meter, "add"), (Breakdown, "count")]
ALL = [*OF_A_STEP, (Breakdown, "read"), (MetricsLogger, "logged")]
TIMED_BLOCKS = 3


def parse() -> tuple[argparse.Namespace, Config]:
    """This program's flags, and the trainer's settings."""
    parser = argparse.ArgumentParser(description="Cost of the step breakdown.", allow_abbrev=False)
    parser.add_argument("--model", help="Folder or config.json of a BERT. (default: BERT-base)")
    parser.add_argument("--length", type=int, default=178, help="Tokens per window. (default: SQuAD's mean)")
    parser.add_argument("--block", type=int, default=10, help="Steps per block and log line. (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="Pairs of blocks. (default: %(default)s)")
    flags, rest = parser.parse_known_args()
    total = flags.block * (2 * flags.pairs + TIMED_BLOCKS + 1)
    ours = ["--no_do_eval", "--eval_strategy=no", "--save_steps=0", f"--max_steps={total + 1}"]
    return flags, command_line.parse(command_line.overriding(rest, [*ours, f"--logging_steps={flags.block}"]))


def even_inputs(flags: argparse.Namespace, config: Config, world: World) -> Inputs:
    """The inputs of `python -m hvd_bert.bench`, with windows of one length and no smaller step at an epoch's end."""
    inputs = random_inputs(flags.model, world.size, config, world)
    assert inputs.train is not None
    plan = inputs.train.plan
    lengths = np.full(16 * plan.global_batch, flags.length, np.int32)
    table = random_windows(lengths, inputs.model.config.vocab_size, config.train.seed)
    plan = dataclasses.replace(plan, lengths=lengths)
    return dataclasses.replace(inputs, train=TrainingSet(inputs.train.source, table, plan))


@contextmanager
def replaced(methods: list[tuple[type, str]], by: Callable[[str, Method], Method]) -> Iterator[None]:
    """Inside, `by(name, method)` replaces each method."""
    before = [getattr(owner, name) for owner, name in methods]
    for (owner, name), method in zip(methods, before, strict=True):
        setattr(owner, name, by(f"{owner.__name__}.{name}", method))
    try:
        yield
    finally:
        for (owner, name), method in zip(methods, before, strict=True):
            setattr(owner, name, method)


def block(training: Training, steps: int, world: World, with_records: bool = True) -> Seconds:
    """The time of `steps` steps."""
    world.allgather(None)
    start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        outcome = training._step()
        stops = training.stop_requests.any_rank_stops()
        if with_records:
            training._after_step(*outcome, stops)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def without(training: Training, steps: int, world: World) -> Seconds:
    """The time of `steps` steps without the records."""
    with training.state.meter.paused(), replaced(OF_A_STEP, lambda name, method: lambda *arguments: None):
        return block(training, steps, world, with_records=False)


def calls(training: Training, steps: int, world: World) -> dict[str, dict[str, float]]:
    """The cost of each call: calls per step, microseconds, share of the step."""
    taken: dict[str, list[float]] = {}

    def timed(name: str, method: Method) -> Method:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                taken.setdefault(name, []).append(time.perf_counter() - start)

        return call

    with replaced(ALL, timed):
        whole = sum(block(training, steps, world)[0] for _ in range(TIMED_BLOCKS))
    return {
        name: {
            "per_step": len(each) / (TIMED_BLOCKS * steps),
            "median_us": 1e6 * statistics.median(each),
            "share_of_step": sum(each) / whole,
        }
        for name, each in taken.items()
    }


def ratio(pairs: list[tuple[Seconds, Seconds]], kind: int) -> dict[str, Any]:
    """Blocks with records over blocks without: median, quartiles and range over the pairs."""
    ratios = [recorded[kind] / plain[kind] for recorded, plain in pairs]
    minimum, middle, maximum = statistics.quantiles(ratios, n=4)
    return {"median": middle, "quartiles": [minimum, maximum], "range": [min(ratios), max(ratios)]}


def main(world: World) -> None:
    """The measurement on one rank. Called by all ranks."""
    with world.raise_on_all_ranks():
        flags, config = parse()
    set_up(config, world)
    task = QuestionAnswering(config, world, even_inputs(flags, config, world))
    task.model.to(device=world.device)
    with tempfile.TemporaryDirectory() as folder:
        config.train.output_dir = folder
        reporters = start(config.train.reporters, Path(folder)) if world.rank == 0 else []
        with closing(MetricsLogger(Path(folder), world.rank == 0, reporters)) as metrics_logger:
            training = Training(task, None, None, config, world)
            training.open(metrics_logger)
            metrics_logger.begin(config.train.max_steps, 0, training.plan.steps_per_epoch)
            training.state.strategy.module.train()
            with closing(training.batches):
                block(training, flags.block, world)  # warm-up
                pairs = []
                for number in range(flags.pairs):
                    took = {}
                    for recorded in (number % 2 == 0, number % 2 != 0):
                        run = block if recorded else without
                        took[recorded] = run(training, flags.block, world)
                    pairs.append((took[True], took[False]))
                each = calls(training, flags.block, world)
    if world.rank == 0:
        result = {
            "ranks": world.size,
            "step_ms": 1000 * statistics.median(plain[0] for _, plain in pairs) / flags.block,
            "with_over_without": ratio(pairs, 0),
            "processor_time": ratio(pairs, 1),
            "calls": each,
            "calls_share_of_step": sum(call["share_of_step"] for call in each.values()),
        }
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_as_rank(main, strategy=parse()[1].parallel.strategy)
