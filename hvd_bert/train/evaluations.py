"""Evaluations of a run: the task's, timed and counted."""

from __future__ import annotations

import time

from torch import nn

from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.tasks.base import EvaluationResult, Task


class Evaluations:
    """Evaluates a task's models. `totals`: number and total duration of the evaluations."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._last_s = 0.0
        self.totals = {"evaluations": 0, "evaluation_s": 0.0}

    def __call__(self, model: nn.Module) -> EvaluationResult:
        """A collective."""
        start = time.perf_counter()
        evaluation = self.task.evaluate(model)
        self._last_s = time.perf_counter() - start
        self.totals["evaluations"] += 1
        self.totals["evaluation_s"] += self._last_s
        return evaluation

    def record(self, evaluation: EvaluationResult, metrics_logger: MetricsLogger, step: int) -> None:
        """Record and show the last evaluation, which is of the model of step `step`."""
        metrics = evaluation.metrics | {"eval_s": self._last_s}
        metrics_logger.evaluated(metrics, evaluation.summary, step, evaluation.files.get("eval_samples.json", ()))
