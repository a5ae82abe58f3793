"""`Callback`, whose methods are called during a run, and `RunResult`, the result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these modules import torch, which takes seconds
    from hvd_bert.distributed.world import World
    from hvd_bert.tasks.base import MicroBatch, Task

SHOWN_SCORES = 6  # in the text of a RunResult


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run.

    Attributes:
        output_dir: The output folder.
        scores: Metrics of the final evaluation; empty if the run did not evaluate.
        results: Content of train_results.json. Has fewer keys if the run did not train, and on ranks other than 0.
    """

    output_dir: Path
    scores: dict[str, float]
    results: dict[str, Any]

    def __repr__(self) -> str:
        """Describe the run in a line or two: `results` fills screens of a notebook."""
        names = [*self.scores][:SHOWN_SCORES]
        scores = ", ".join(f"{name!r}: {self.scores[name]:.4g}" for name in names)
        more = ", ..." if len(self.scores) > len(names) else ""
        keys = f"results=<{len(self.results)} keys>"
        return f"RunResult(output_dir={str(self.output_dir)!r}, scores={{{scores}{more}}}, {keys})"


class Callback:
    """Base class of callbacks. Override the methods that you need.

    All methods except `on_save` are called on all ranks at the same points, so they may use collectives. An exception
    ends the run on all ranks.
    """

    def on_start(self, task: Task, world: World) -> None:
        """Called once the task is loaded, with its model in `task.model`."""

    def on_batch(self, batch: MicroBatch) -> None:
        """Called with each micro-batch before its forward pass."""

    def on_step(self, step: int) -> None:
        """Called after step `step` (1, 2, ...)."""

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        """Called after a line of metrics.jsonl for step `step` is written.

        Only rank 0's `metrics` may have `checkpoint_write_s`. On a GPU, the call may come after the next step.
        """

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Called after an evaluation of the model of step `step`, which is 0 if the run does not train."""

    def on_save(self, step: int, folder: Path) -> None:
        """Called on rank 0 only, after the checkpoint of step `step` is written. `folder`: the checkpoint."""

    def on_end(self, run: RunResult) -> None:
        """Called after all output files are written."""
