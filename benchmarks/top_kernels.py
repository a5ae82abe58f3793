"""Prints the kernels that take most of a device's time while the trainer trains on random windows, and their number.

    python benchmarks/top_kernels.py --bf16 --per_device_train_batch_size 32

Takes the flags of `hvd-bert bench`. `--steps` steps are recorded by torch's profiler, after as many that are
not. On the CPU it lists torch's operators instead.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from random_training import end, prepare
from shared import markdown_table
from torch.profiler import ProfilerActivity, profile

from hvd_bert.training.loop import Training

ROWS = 10


def top(recorded: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """The kernels, the longest first: name, calls, seconds and share."""
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
    longest = sorted(times.items(), key=lambda item: -item[1][0])
    return [
        {"name": name, "calls": int(calls), "seconds": seconds, "share": seconds / total}
        for name, (seconds, calls) in longest
    ]


def main() -> None:
    """Parse, train with the profiler running from the middle on, print."""
    made = prepare(sys.argv[1:], 1, "The kernels that dominate a training.")
    on_gpu = made.world.device.type == "cuda"
    recorded = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    class Profiled(Training):
        def _after_step(self, *args: Any) -> None:
            super()._after_step(*args)
            if self.state.step == made.section:
                recorded.start()

    made.run(Profiled)
    recorded.stop()
    rows = top(recorded, on_gpu)
    record = {
        "device": str(made.world.device),
        "launches_per_step": sum(row["calls"] for row in rows) / made.section,
        "busy_ms_per_step": 1000 * sum(row["seconds"] for row in rows) / made.section,
        "kernels": rows[:ROWS],
    }
    if made.out:
        made.out.write_text(json.dumps(record, indent=1) + "\n")
    print("{launches_per_step:.0f} launches per step, which take {busy_ms_per_step:.1f} ms\n".format(**record))
    cells = [[row["name"][:100], str(row["calls"]), f"{row['share']:.1%}"] for row in rows[:ROWS]]
    print(markdown_table(["kernel", "calls", "share of the device's time"], cells))


if __name__ == "__main__":
    end(main)
