"""When a checkpoint is due, which evaluation is the best one, and when a training ends early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_bert.config.settings import CheckpointArguments
from hvd_bert.storage.reading import Count


@dataclass
class Best:
    """The best evaluation so far: its value, its step, and how many evaluations since were not better.

    `mode`: whether the "max" or the "min" of the metric is best. `folder`: on rank 0, the run's that has the step's
    checkpoint, if it is another one, which was resumed from.
    """

    metric: str
    mode: str = "max"
    value: float | None = None
    step: Count = 0
    since: Count = 0
    folder: str = ""

    def state(self) -> dict[str, Any]:
        """A copy for a checkpoint, without the mode, which follows from the task."""
        return {name: value for name, value in vars(self).items() if name != "mode" and value != ""}

    def update(self, step: int, metrics: dict[str, float]) -> bool:
        """Record an evaluation. Returns whether it is the best so far; NaN never is."""
        value = metrics[self.metric]
        gain = value == value and (
            self.value is None or (value < self.value if self.mode == "min" else value > self.value)
        )
        if gain:
            self.value, self.step, self.since, self.folder = value, step, 0, ""
        else:
            self.since += 1
        return gain


def is_due(args: CheckpointArguments, step: int, is_last: bool) -> bool:
    """Whether to save after step `step`: every --save_steps, and at the end."""
    return args.save_steps > 0 and (step % args.save_steps == 0 or is_last)
