"""Counts the host's waits for the GPU in a training step, and times evaluation passes next to training.

    python benchmarks/acceptance_steps.py --out FILE --bf16 --per_device_train_batch_size 32

Takes the flags of `hvd-bert bench`. Trains three sections of `--steps` steps: a warm-up, one in which torch reports
each operation that waits for the GPU, without the step that is logged, and one that is timed. Then the last section's
windows pass through the model without gradients.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from random_training import end, prepare

from hvd_bert.distributed.world import World
from hvd_bert.model.precision import autocast, evaluating
from hvd_bert.tasks.base import Task
from hvd_bert.training.loop import Training


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


def main() -> None:
    """Parse, train, evaluate, print or write."""
    made = prepare(sys.argv[1:], 2, "Waits of the host, and the rate of evaluation.")
    steps, on_gpu = made.section, made.world.device.type == "cuda"
    waits: list[list[str]] = []  # per step

    class Counting(Training):
        """Counts the waits of the steps between two that are logged."""

        def _step(self) -> Any:
            if not on_gpu or not steps <= self.state.step < 2 * steps - 1:
                return super()._step()
            with counted_waits() as found:
                result = super()._step()
            waits.append(found)
            return result

    _, recorder = made.run(Counting)
    last = range(2 * steps, 3 * steps)
    record = {
        "waits": sum(map(len, waits)) if on_gpu else None,
        "steps": len(waits),
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "training_per_s": recorder.rows[-1]["windows_per_s"],
        "evaluation_per_s": evaluated_per_s(made.task, made.world, last, made.config.train.precision),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if made.out:
        made.out.write_text(text + "\n")


if __name__ == "__main__":
    end(main)
