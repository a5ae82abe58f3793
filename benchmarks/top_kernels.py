"""Prints the kernels that take most of a device's time while the trainer trains on random windows.

    python benchmarks/top_kernels.py --bf16 --per_device_train_batch_size 32

Takes the flags of `hvd-bert bench`. `--steps` steps are recorded by torch's profiler, after as many that are
not. On the CPU it lists torch's operators instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared import markdown_table
from torch.profiler import ProfilerActivity, profile

from hvd_bert.config.settings import Config
from hvd_bert.distributed.runner import join
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.tools.bench import __main__ as bench_flags
from hvd_bert.tools.bench.measure import Recorder
from hvd_bert.tools.bench.speed import random_task
from hvd_bert.train.loop import Training
from hvd_bert.train.start import set_up

ROWS = 10


def train(config: Config, model: str | None, windows: int, world: World, recorded: Any) -> None:
    """Train with the profiler running from the middle on."""
    task = random_task(model, windows, config, world)
    task.model.to(device=world.device)
    with tempfile.TemporaryDirectory() as folder:
        config.train.output_dir = folder
        training = Training(task, None, None, config, world)
        after_step = training._after_step
        half = config.train.max_steps // 2

        def start_in_the_middle(*args: Any) -> None:
            after_step(*args)
            if training.state.step == half:
                recorded.start()

        training._after_step = start_in_the_middle  # type: ignore[assignment, method-assign]
        training.run(Recorder())
        recorded.stop()


def top(recorded: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """The kernels by their time: name, calls, seconds and share."""
    times: dict[str, list[float]] = {}
    for event in recorded.key_averages():
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        # Annotations, such as "Optimizer.step", span kernels that have rows of their own.
        is_kernel = event.device_type.name != "CPU" and not getattr(event, "is_user_annotation", False)
        if microseconds and (is_kernel or not on_gpu):
            entry = times.setdefault(event.key, [0.0, 0.0])
            entry[0] += microseconds / 1e6
            entry[1] += event.count
    total = sum(seconds for seconds, _ in times.values())
    longest = sorted(times.items(), key=lambda item: -item[1][0])[:ROWS]
    return [
        {"name": name, "calls": int(calls), "seconds": seconds, "share": seconds / total}
        for name, (seconds, calls) in longest
    ]


def main(argv: list[str]) -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description="The kernels that dominate a training.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="Also write a JSON file. (default: none)")
    own, rest = parser.parse_known_args(argv)
    given, config = bench_flags.parse(["--repeats", "1", *rest])
    world = join(config.parallel.strategy)
    world.set_up_device()
    set_up(config, world)
    on_gpu = world.device.type == "cuda"
    recorded = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
    step = config.train.windows_per_step(world.size * world.devices)
    train(config, given.model, step * config.train.max_steps, world, recorded)
    rows = top(recorded, on_gpu)
    if own.out:
        own.out.write_text(json.dumps({"device": str(world.device), "kernels": rows}, indent=1) + "\n")
    cells = [[row["name"][:100], str(row["calls"]), f"{row['share']:.1%}"] for row in rows]
    print(markdown_table(["kernel", "calls", "share of the device's time"], cells))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"top_kernels.py: error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
