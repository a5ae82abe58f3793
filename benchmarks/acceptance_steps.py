"""Counts the host's waits for the GPU in a training step, and times evaluation passes next to training.

    python benchmarks/acceptance_steps.py --out FILE --bf16 --per_device_train_batch_size 32

Takes the flags of `hvd-bert bench`. Trains three sections of `--steps` steps: a warm-up, one in which torch reports
each operation that waits for the GPU, without the step that is logged, and one that is timed. Then the last section's
windows pass through the model without gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hvd_bert.distributed.runner import join
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.model.precision import autocast, evaluating
from hvd_bert.tasks.base import Task
from hvd_bert.tools.bench import __main__ as bench_flags
from hvd_bert.tools.bench.measure import Recorder
from hvd_bert.tools.bench.speed import random_task
from hvd_bert.train.loop import Training
from hvd_bert.train.start import set_up


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Yields a list that has, after the block, torch's warning for each operation in it that waited for the GPU."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [str(warning.message) for warning in seen if "synchronizing CUDA operation" in str(warning.message)]


class Counting(Training):
    """A training that counts the waits of the steps between two that are logged: `first` + 1 to 2 `first` - 1."""

    first = 0
    waits: int | None = None

    def _step(self) -> Any:
        if self.world.device.type != "cuda" or not self.first <= self.state.step < 2 * self.first - 1:
            return super()._step()
        with counted_waits() as waits:
            result = super()._step()
        self.waits = (self.waits or 0) + len(waits)
        return result


def evaluated_per_s(task: Task, world: World, steps: range, precision: str) -> float:
    """Windows/s of the steps' windows, in batches of the same size, which are made before."""
    assert task.plan is not None
    batches = [task.batch(ids) for step in steps for ids in task.plan.rank_windows(step, world.rank)]
    with evaluating(task.model), autocast(world.device, precision):
        for timed in (batches[:1], batches):  # the first one warms up
            _wait(world.device)
            start = time.perf_counter()
            for batch in timed:
                task.losses(task.model, batch)
            _wait(world.device)
    return sum(batch.num_windows for batch in batches) / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: list[str]) -> None:
    """Parse, train, evaluate, write."""
    parser = argparse.ArgumentParser(description="Waits of the host, and the rate of evaluation.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="The JSON file to write.")
    own, rest = parser.parse_known_args(argv)
    given, config = bench_flags.parse(["--repeats", "2", *rest])
    world = join(config.parallel.strategy)
    world.set_up_device()
    set_up(config, world)
    count = config.train.windows_per_step(world.size * world.devices) * config.train.max_steps
    task = random_task(given.model, count, config, world)
    task.model.to(device=world.device)
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        config.train.output_dir = folder
        training = Counting(task, None, None, config, world)
        training.first = given.steps
        training.run(recorder)
    last = range(2 * given.steps, 3 * given.steps)
    record = {
        "waits": training.waits,
        "steps": given.steps - 1,
        "training_per_s": recorder.rows[-1]["windows_per_s"],
        "evaluation_per_s": evaluated_per_s(task, world, last, config.train.precision),
    }
    own.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"acceptance_steps.py: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
