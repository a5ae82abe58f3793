"""What the benchmarks share that train on random windows in this process."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_bert.config.settings import Config
from hvd_bert.distributed.runner import join
from hvd_bert.distributed.world import World
from hvd_bert.model.layers import place
from hvd_bert.output.callback import Callback
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.bench import __main__ as bench_flags
from hvd_bert.tools.bench.speed import random_task
from hvd_bert.training.loop import Training
from hvd_bert.training.start import Start, set_up
from hvd_bert.training.start import prepare as prepare_training


@dataclass(frozen=True)
class Prepared:
    """A training that can start. `section`: steps between two logged ones; `out`: the JSON file to write."""

    out: Path | None
    section: int
    config: Config
    world: World
    task: QuestionAnswering

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    def run(self, callback: Callback) -> None:
        """Train. The metrics go to the callback only."""
        metrics_logger = MetricsLogger(Path(), enabled=False)
        metrics_logger.callbacks = [callback]
        start = Start(self.config, self.task)
        with tempfile.TemporaryDirectory() as folder:
            prepared = prepare_training(start, self.world)
            Training(start.in_folder(Path(folder)), prepared, None, metrics_logger, self.world).run()


def prepare(argv: Sequence[str], sections: int, description: str | None) -> Prepared:
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
