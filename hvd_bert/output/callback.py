"""`Callback`, the hooks of a program into a run, and `RunResult`, the result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # large libraries
    from hvd_bert.distributed.world import World
    from hvd_bert.tasks.base import MicroBatch, Task


@dataclass(frozen=True)
class RunResult:
    """A finished run. `scores`: {} without an evaluation. `results`: content of train_results.json."""

    output_dir: Path
    scores: dict[str, float]
    results: dict[str, Any]


class Callback:
    """Override the methods that you need. All ranks call them at the same points, except `on_save`, so they may use
    collectives. An exception ends the run on all ranks."""

    def on_start(self, task: Task, world: World) -> None:
        """The task is loaded, with its model in `task.model`."""

    def on_batch(self, batch: MicroBatch) -> None:
        """A micro-batch is ready: its forward pass is next."""

    def on_step(self, step: int) -> None:
        """Step `step` (1, 2, ...) is done."""

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """A line of metrics.jsonl is written; ranks other than 0 lack its metrics of checkpoints and GPUs. On a GPU,
        step `step` + 1 may be done already."""

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """The model of step `step` is evaluated. `step` is 0 without a training."""

    def on_save(self, step: int, folder: Path) -> None:
        """The checkpoint of step `step` is written. Called on rank 0 only."""

    def on_end(self, run: RunResult) -> None:
        """All files are written."""
