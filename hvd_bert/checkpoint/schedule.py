"""When to log, evaluate and save, and the best evaluation so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvd_bert.config.settings import Config
from hvd_bert.storage.reading import Count


@dataclass
class Best:
    """The best evaluation so far.

    Attributes:
        metric: Name of the metric that decides which evaluation is best.
        mode: Whether the "max" or the "min" of the metric is best.
        value: The best value; None before the first evaluation.
        step: Step of the best evaluation.
        since: Number of later evaluations, none of which was better.
        folder: On rank 0, the output folder that has the step's checkpoint; "" for the run's own folder.
    """

    metric: str
    mode: str = "max"
    value: float | None = None
    step: Count = 0
    since: Count = 0
    folder: str = ""

    def state(self) -> dict[str, Any]:
        """Return the fields for a checkpoint, except an empty folder and the mode, which follows from the task."""
        return {name: value for name, value in vars(self).items() if name != "mode" and value != ""}

    def update(self, step: int, metrics: dict[str, float]) -> bool:
        """Record an evaluation of the model of step `step`. Returns whether it is the best so far; NaN never is."""
        value = metrics[self.metric]
        if self._is_better(value):
            self.value, self.step, self.since, self.folder = value, step, 0, ""
            return True
        self.since += 1
        return False

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return not math.isnan(value)
        return value < self.value if self.mode == "min" else value > self.value


@dataclass(frozen=True)
class Due:
    """The actions that are due after a step, in this order. `ends`: whether the training ends with this step."""

    log: bool
    evaluate: bool
    save: bool
    ends: bool


def due(
    step: int, total_steps: int, steps_per_epoch: int, config: Config, evaluates: bool = True, since: int = 0
) -> Due:
    """Decide what is due after step `step` (1, 2, ...).

    The last step evaluates only with --load_best_model_at_end, to compare its model with the best one. Otherwise the
    final model is evaluated after the training. `evaluates`: whether the run has data to evaluate on. `since`:
    `Best.since`.
    """
    train, args = config.train, config.checkpoint
    every = {"no": total_steps, "epoch": steps_per_epoch, "steps": train.eval_steps or train.logging_steps}
    is_last, patience = step >= total_steps, args.early_stopping_patience
    ends = is_last or (patience is not None and since >= patience)
    evaluate = evaluates and (args.load_best_model_at_end if is_last else step % every[train.eval_strategy] == 0)
    return Due(
        log=evaluate or ends or step == 1 or step % train.logging_steps == 0,
        evaluate=evaluate,
        save=args.save_steps > 0 and (step % args.save_steps == 0 or ends),
        ends=ends,
    )
