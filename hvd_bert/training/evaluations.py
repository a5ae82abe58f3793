"""Evaluations during a run, and the results of a training that the final evaluation needs."""

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
    """The results of a training, whose model is in the task and has the weights of step `step`.

    `evaluation`: of this model, if it was evaluated. `eval_pending`: its evaluation still counts for the best score.
    `to_resume`: the state, under Horovod elastic.
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
        """A collective."""
        start = time.perf_counter()
        evaluation = self.task.evaluate(model)
        self._last_s = time.perf_counter() - start
        self._totals["evaluations"] += 1
        self._totals["evaluation_s"] += self._last_s
        return evaluation

    def evaluate_trained(self, trained: Trained, metrics_logger: MetricsLogger) -> EvaluationResult:
        """The evaluation of the trained model. A collective."""
        evaluation = trained.evaluation
        if evaluation is None:
            evaluation = self.evaluate(self.task.model)
            self.record(evaluation, metrics_logger, trained.step)
        if trained.eval_pending and self.best:
            self.best.update(trained.step, evaluation.metrics)
        return evaluation

    def record(self, evaluation: EvaluationResult, metrics_logger: MetricsLogger, step: int) -> None:
        """Record and show the last evaluation. `step`: of the model."""
        metrics = evaluation.metrics | {"eval_s": self._last_s}
        metrics_logger.evaluated(metrics, evaluation.summary, step, evaluation.files.get("eval_samples.json", ()))

    def results(self) -> dict[str, Any]:
        """The evaluations' keys of train_results.json."""
        return self._totals | ({"best": self.best.state()} if self.best else {})
