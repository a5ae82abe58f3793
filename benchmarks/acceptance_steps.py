"""Counts the host's waits for the GPU in a training step, and times evaluation passes next to training.

    python benchmarks/acceptance_steps.py --out FILE --bf16 --per_device_train_batch_size 32

Takes the flags of `hvd-bert bench`. Trains three sections of `--steps` steps: a warm-up, one in which torch reports
each operation that waits for the GPU, without the step that is logged, and one that is timed. Then the last section's
windows pass through the model without gradients.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from random_training import Prepared, prepare
from shared import end, write_record

from hvd_bert.model.precision import autocast, evaluating
from hvd_bert.output.callback import Callback


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


class Waits(Callback):
    """The waits of the second section's steps, up to the one that is logged; and the windows/s of the last section."""

    def __init__(self, section: int) -> None:
        self.section, self.windows_per_s = section, 0.0
        self.found: list[str] = []
        self._counting = ExitStack()

    def on_step(self, step: int) -> None:
        if step == 2 * self.section - 1:
            self._counting.close()

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self.windows_per_s = metrics["windows_per_s"]
        if step == self.section and torch.cuda.is_available():
            self.found = self._counting.enter_context(counted_waits())


def evaluated_per_s(made: Prepared) -> float:
    """Windows/s of the last section's windows, in batches of the same size, which are made before."""
    task, device = made.task, made.world.device
    assert task.plan is not None
    steps = range(2 * made.section, 3 * made.section)
    batches = [task.batch(ids) for step in steps for ids in task.plan.rank_windows(step, made.world.rank)]
    with evaluating(task.model), autocast(device, made.config.train.precision):
        for timed in (batches[:1], batches):  # the first one warms up
            _wait(device)
            start = time.perf_counter()
            for batch in timed:
                task.losses(task.model, batch)
            _wait(device)
    return sum(batch.num_windows for batch in batches) / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Parse, train, evaluate, print or write."""
    made = prepare(sys.argv[1:], 2, "Waits of the host, and the rate of evaluation.")
    waits = Waits(made.section)
    made.run(waits)
    record = {
        "waits": len(waits.found) if made.on_gpu else None,
        "steps": made.section - 1 if made.on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if made.on_gpu else None,
        "training_per_s": waits.windows_per_s,
        "evaluation_per_s": evaluated_per_s(made),
    }
    write_record(record, made.out)


if __name__ == "__main__":
    end(main)
