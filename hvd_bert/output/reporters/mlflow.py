"""MLflow. Its own variables (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, ...) apply."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from hvd_bert.errors import as_user_error
from hvd_bert.output.reporters.base import Reporter, Samples, Settings, keep_run_id, read_run_id

MAX_PARAMS = 100  # per call


def _refused(reason: str) -> str:
    return f"--report_to mlflow: no run can be started: {reason}. Check MLFLOW_TRACKING_URI."


class Mlflow(Reporter):
    title = "MLflow"

    @classmethod
    def check(cls) -> None:
        with as_user_error(_refused):
            _experiment(MlflowClient())

    def __init__(self, folder: Path) -> None:
        """Raises UserError."""
        run_id = read_run_id(folder, "mlflow")
        with as_user_error(_refused):
            self._client = MlflowClient()
            if run_id is None:
                experiment = _experiment(self._client) or self._client.create_experiment(_experiment_name())
                run = self._client.create_run(experiment, run_name=folder.absolute().name)
            else:
                self._client.update_run(run_id, status="RUNNING")
                run = self._client.get_run(run_id)
        self._id = str(run.info.run_id)
        keep_run_id(folder, "mlflow", self._id)
        self._known = set(run.data.params)

    def settings(self, settings: Settings) -> None:
        # MLflow refuses another value of a parameter, as a resumed run may have.
        params = [Param(name, str(value)[:500]) for name, value in settings.items() if name not in self._known]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in scalars.items()])

    def samples(self, step: int, samples: Samples) -> None:
        self._client.log_dict(self._id, list(samples), f"eval_samples/step-{step}.json")

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def _experiment(client: MlflowClient) -> str | None:
    """The id of the experiment that MLflow's variables name; None if the server has none of that name."""
    if "MLFLOW_EXPERIMENT_ID" in os.environ:
        found = client.get_experiment(os.environ["MLFLOW_EXPERIMENT_ID"])
    else:
        found = client.get_experiment_by_name(_experiment_name())
    return str(found.experiment_id) if found else None


def _experiment_name() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
