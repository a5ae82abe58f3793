"""`Callback`: a program's own code at some points of a run, and `RunResult`, which the program gets from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # large libraries
    from hvd_bert.distributed.world import World
    from hvd_bert.tasks.base import MicroBatch, Task


@dataclass(frozen=True)
class RunResult:
    """A finished run. `scores`: of its model, {} without an evaluation. `results`: as in train_results.json."""

    output_dir: Path
    scores: dict[str, float]
    results: dict[str, Any]


class Callback:
    """Override what you need. All ranks call the methods, except `on_save`, at the same points, so they may use
    collectives. An exception ends the run on all ranks."""

    def on_start(self, task: Task, world: World) -> None:
        """Everything is loaded. `task.model` is the model."""

    def on_batch(self, batch: MicroBatch) -> None:
        """A micro-batch is ready: its forward pass is next."""

    def on_step(self, step: int) -> None:
        """Step `step` (1, 2, ...) is done."""

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of a line of metrics.jsonl; other ranks than 0 lack those of checkpoints and GPUs. On a GPU step
        `step` + 1 may be done already."""

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """The model of step `step` is evaluated; 0: without a training."""

    def on_save(self, step: int, folder: Path) -> None:
        """The checkpoint of step `step` is written. On rank 0 only."""

    def on_end(self, run: RunResult) -> None:
        """All files are written."""
