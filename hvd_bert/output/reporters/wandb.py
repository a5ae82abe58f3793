"""Weights & Biases. Its own variables (WANDB_MODE, WANDB_PROJECT, WANDB_DIR, ...) apply."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import wandb

from hvd_bert.errors import as_user_error
from hvd_bert.output.reporters.base import Reporter, Samples, Settings, keep_run_id, read_run_id
from hvd_bert.storage import written

FOLDER = "wandb"
SERVICE = "wandb-core"
STEP = "train/global_step"  # as transformers names it


def _refused(reason: str) -> str:
    return f"--report_to wandb: no run can be started: {reason}. Without a server set WANDB_MODE=offline."


class Wandb(Reporter):
    title = "wandb"

    @classmethod
    def check(cls) -> None:
        with as_user_error(_refused):
            if wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
                wandb.login()

    def __init__(self, folder: Path) -> None:
        """Raises UserError."""
        if "WANDB_DIR" not in os.environ:
            written.add(folder, FOLDER)
        with as_user_error(_refused):
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "hvd_bert"),
                name=os.environ.get("WANDB_NAME", folder.absolute().name),
                dir=os.environ.get("WANDB_DIR", folder),
                id=read_run_id(folder, FOLDER),
                resume="allow",
                settings=wandb.Settings(console="off"),  # standard output stays as it is
            )
        keep_run_id(folder, FOLDER, self._run.id)
        # wandb's own step must not go back, as it does when a run resumes.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    def settings(self, settings: Settings) -> None:
        self._run.config.update(dict(settings), allow_val_change=True)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, STEP: step})

    def samples(self, step: int, samples: Samples) -> None:
        names = list(samples[0])
        rows = [[" | ".join(value) if isinstance(value, list) else value for value in row.values()] for row in samples]
        self._run.log({"eval/samples": wandb.Table(columns=names, data=rows), STEP: step})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)

    def abandon(self) -> None:
        # At exit wandb would wait for its service process without end. torch_world.py runs its exit function, too.
        for process in psutil.Process().children():
            if process.name() == SERVICE:
                process.kill()
        with suppress(Exception, SystemExit):  # the connection is lost, or the service's status is not 0
            wandb.teardown()  # unregisters the exit function
