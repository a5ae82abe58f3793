"""MLflow. Its own variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) apply."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from hvd_bert.errors import as_user_error
from hvd_bert.training.reporters import run_ids
from hvd_bert.training.reporters.base import Reporter, Samples, Settings

MAX_PARAMS = 100  # per call
MAX_LENGTH = 500  # of a parameter's value, in servers of MLflow 1 and 2


class Mlflow(Reporter):
    title = "MLflow"

    def __init__(self, folder: Path) -> None:
        """Raises UserError."""
        run_id = run_ids.read(folder, "mlflow")
        with as_user_error("--report_to mlflow: no run can be started: {}. Check MLFLOW_TRACKING_URI.".format):
            self._client = MlflowClient()
            if run_id is None:
                run = self._client.create_run(self._experiment(), run_name=folder.absolute().name)
            else:
                self._client.update_run(run_id, status="RUNNING")
                run = self._client.get_run(run_id)
        self._id = str(run.info.run_id)
        run_ids.keep(folder, "mlflow", self._id)
        self._known = set(run.data.params)

    def _experiment(self) -> str:
        if "MLFLOW_EXPERIMENT_ID" in os.environ:
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def settings(self, settings: Settings) -> None:
        # MLflow refuses another value of a parameter, as a resumed run may have.
        params = [Param(name, str(value)[:MAX_LENGTH]) for name, value in settings.items() if name not in self._known]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in scalars.items()])

    def samples(self, step: int, samples: Samples) -> None:
        self._client.log_dict(self._id, list(samples), f"eval_samples/step-{step}.json")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
