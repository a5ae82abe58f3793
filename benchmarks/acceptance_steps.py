"""Counts the host's waits for the GPU in a training step, and times evaluation passes next to training.

    python benchmarks/acceptance_steps.py --out FILE --bf16 --per_device_train_batch_size 32

Takes the flags of `hvd-bert bench`. Trains three sections of `--steps` steps: a warm-up, one in which torch reports
each operation that waits for the GPU, and one that is timed. Then the last section's windows pass through the model
without gradients.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from shared import end, write_record

from hvd_bert.config.settings import Config
from hvd_bert.distributed.runner import join
from hvd_bert.distributed.world import World
from hvd_bert.model.layers import place
from hvd_bert.model.precision import autocast, evaluating
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.bench import __main__ as bench_flags
from hvd_bert.tools.bench.measure import Recorder
from hvd_bert.tools.bench.speed import random_task
from hvd_bert.training.loop import Training
from hvd_bert.training.start import Start, set_up
from hvd_bert.training.start import prepare as prepare_training


@dataclass(frozen=True)
class Prepared:
    """A training on random windows that can start. `section`: steps between two logged ones; `out`: the JSON file to
    write."""

    out: Path | None
    section: int
    config: Config
    world: World
    task: QuestionAnswering

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def run(self, recorder: Recorder) -> None:
        """Train. The metrics go to the recorder only."""
        start = Start(self.config, self.task)
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare_training(start, self.world)
            Training(start.in_folder(Path(folder)), prepared, None, recorder.logger(), self.world).run()


def prepare(argv: Sequence[str], sections: int, description: str) -> Prepared:
    """From the flags of `hvd-bert bench`, and --out. Raises UserError. `sections`: timed ones, after a warm-up."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="Also write a JSON file. (default: none)")
    own, rest = parser.parse_known_args(argv)
    given, config = bench_flags.parse(["--repeats", str(sections), *rest])
    world = join(config.parallel.strategy)
    world.set_up_device()
    set_up(config, world)
    count = config.train.windows_per_step(world.size * world.devices) * config.train.max_steps
    task = random_task(given.model, count, config, world)
    place(task.model, world.device)
    return Prepared(own.out, given.steps, config, world, task)


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


class Waits(Recorder):
    """The waits of the second section's steps."""

    def __init__(self, section: int) -> None:
        super().__init__()
        self.section, self.found, self._counting = section, list[str](), ExitStack()

    def on_step(self, step: int) -> None:
        if step == 2 * self.section:
            self._counting.close()
        if step == self.section and torch.cuda.is_available():
            self.found = self._counting.enter_context(counted_waits())


def evaluated_per_s(made: Prepared) -> float:
    """Windows/s of the last section's windows, in batches of the same size, which are made before."""
    task = made.task
    assert task.plan is not None
    steps = range(2 * made.section, 3 * made.section)
    batches = [task.batch(ids) for step in steps for ids in task.plan.rank_windows(step, made.world.rank)]
    with evaluating(task.model), autocast(made.world.device, made.config.train.precision):
        for timed in (batches[:1], batches):  # the first one warms up
            made.wait()
            start = time.perf_counter()
            for batch in timed:
                task.losses(task.model, batch)
            made.wait()
    return sum(batch.num_windows for batch in batches) / (time.perf_counter() - start)


def main() -> None:
    """Parse, train, evaluate, print or write."""
    made = prepare(sys.argv[1:], 2, "Waits of the host, and the rate of evaluation.")
    waits = Waits(made.section)
    made.run(waits)
    record = {
        "waits": len(waits.found) if made.on_gpu else None,
        "steps": made.section if made.on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if made.on_gpu else None,
        "training_per_s": waits.rows[-1]["windows_per_s"],
        "evaluation_per_s": evaluated_per_s(made),
    }
    write_record(record, made.out)


if __name__ == "__main__":
    end(main)
