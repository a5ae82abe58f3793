"""Log a training to MLflow (tested with 3.17): settings, metrics and results.

python examples/log_to_mlflow.py config=sample output_dir=runs/mine          NAME=VALUE for the trainer's --NAME VALUE
horovodrun -np 2 -H localhost:2 python examples/log_to_mlflow.py config=sample output_dir=runs/mine
"""

from __future__ import annotations

import sys
from typing import Any

import mlflow

from hvd_bert import Callback, train


class MLflow(Callback):
    def on_start(self, task: Any, world: Any) -> None:
        self.logs = world.rank == 0
        if self.logs:
            mlflow.start_run()
            mlflow.log_params(task.config.as_flat())

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        if self.logs:
            mlflow.log_metrics(metrics, step)

    on_evaluate = on_log

    def on_end(self, run: Any) -> None:
        if self.logs:
            mlflow.log_artifact(run.output_dir / "train_results.json")
            mlflow.end_run()


if __name__ == "__main__":
    train(**dict(word.partition("=")[::2] for word in sys.argv[1:]), callbacks=[MLflow()])
