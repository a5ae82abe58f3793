"""Evaluations during a run, and the training results that the final evaluation needs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import nn

from hvd_bert.checkpoint.resume import ResumePoint
from hvd_bert.checkpoint.schedule import Best
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.tasks.base import EvaluationResult, Task


@dataclass(frozen=True)
class Trained:
    """A finished training. The task's model has the weights of step `step`.

    Attributes:
        results: The training's results for train_results.json.
        step: Step of the model's weights: the last step, or the best with --load_best_model_at_end.
        evaluation: Evaluation of this model; None if it has not been evaluated.
        eval_pending: Whether the final evaluation still has to update the best score.
        to_resume: Under Horovod elastic, the state from which a new world resumes. Otherwise None.
    """

    results: dict[str, Any]
    step: int
    evaluation: EvaluationResult | None
    eval_pending: bool
    to_resume: ResumePoint | None


class Evaluations:
    """Evaluates the task's model. Counts and times the evaluations."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.best: Best | None = None
        self._last_s = 0.0
        self._totals = {"evaluations": 0, "evaluation_s": 0.0}

    def evaluate(self, model: nn.Module) -> EvaluationResult:
        """Evaluate `model` and time the evaluation. A collective."""
        start = time.perf_counter()
        evaluation = self.task.evaluate(model)
        self._last_s = time.perf_counter() - start
        self._totals["evaluations"] += 1
        self._totals["evaluation_s"] += self._last_s
        return evaluation

    def evaluate_trained(self, trained: Trained, metrics_logger: MetricsLogger) -> EvaluationResult:
        """Return the trained model's evaluation. If it has none, evaluate the model and record it. A collective.

        Updates `best` if that is pending.
        """
        evaluation = trained.evaluation
        if evaluation is None:
            evaluation = self.evaluate(self.task.model)
            self.record(evaluation, metrics_logger, trained.step)
        if trained.eval_pending and self.best:
            self.best.update(trained.step, evaluation.metrics)
        return evaluation

    def record(self, evaluation: EvaluationResult, metrics_logger: MetricsLogger, step: int) -> None:
        """Record and show the latest evaluation, with its duration. `step`: the step of the evaluated weights."""
        metrics = evaluation.metrics | {"eval_s": self._last_s}
        metrics_logger.evaluated(metrics, evaluation.summary, step, evaluation.files.get("eval_samples.json", ()))

    def results(self) -> dict[str, Any]:
        """Return the keys of train_results.json that are about evaluations."""
        return self._totals | ({"best": self.best.state()} if self.best else {})
