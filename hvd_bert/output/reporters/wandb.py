"""Weights & Biases reporter. wandb's environment variables (WANDB_MODE, WANDB_PROJECT, WANDB_DIR, ...) apply."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import wandb

from hvd_bert.errors import as_user_error
from hvd_bert.output.reporters.base import Reporter, Samples, Settings
from hvd_bert.storage.reading import convert, read_json
from hvd_bert.storage.writing import write_json

SERVICE = "wandb-core"
STEP = "train/global_step"  # name of the step, as in transformers' Trainer
RUN_ID = "tracking.json"  # file with the id of the W&B run, which a resumed training continues
PATIENCE_S = 30.0  # seconds to wait for uploads at the end of a run
PATIENCE_UNFINISHED_S = 5.0  # shorter, since a scheduler may soon kill a run that it stopped


def _refused(reason: str) -> str:
    return f"--report_to wandb: no run can be started: {reason}. Without a server set WANDB_MODE=offline."


class Wandb(Reporter):
    """Calls wandb in a thread, so that training does not wait for a server. The next call raises the thread's error."""

    title = "wandb"

    @classmethod
    def check(cls) -> None:
        with as_user_error(_refused):
            if wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
                wandb.login()

    def __init__(self, folder: Path) -> None:
        """Start or continue the W&B run. Raises UserError."""
        with as_user_error(_refused):
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "hvd_bert"),
                name=os.environ.get("WANDB_NAME", folder.absolute().name),
                dir=os.environ.get("WANDB_DIR", folder),
                id=read_run_id(folder),
                resume="allow",
                settings=wandb.Settings(console="off"),  # do not capture standard output
            )
        write_json(folder / RUN_ID, {"wandb": self._run.id})
        # wandb's own step must increase, but a resumed run repeats steps. So define the step as a metric.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        self._error: Exception | None = None
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def settings(self, settings: Settings) -> None:
        self._submit(self._run.config.update, dict(settings), allow_val_change=True)

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        self._submit(self._run.log, {**scalars, STEP: step})

    def samples(self, step: int, samples: Samples) -> None:
        names = list(samples[0])
        rows = [[" | ".join(value) if isinstance(value, list) else value for value in row.values()] for row in samples]
        self._submit(self._run.log, {"eval/samples": wandb.Table(columns=names, data=rows), STEP: step})

    def close(self, finished: bool) -> None:
        """End the W&B run. Waits a limited time for the thread, which may still be ending the run after an error.

        If calls or uploads remain, kills wandb's service process and raises TimeoutError. Otherwise raises the thread's
        error, if any.
        """
        self._calls.put(partial(self._run.finish, exit_code=0 if finished else 1))
        self._calls.put(None)
        self._thread.join(PATIENCE_S if finished else PATIENCE_UNFINISHED_S)
        if self._thread.is_alive():
            _end_service()
            raise TimeoutError("it has not taken everything in time")
        if self._error:
            raise self._error

    def _submit(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Queue a call for the thread. Raises the error of an earlier call."""
        if self._error:
            raise self._error
        self._calls.put(partial(call, *arguments, **options))

    def _work(self) -> None:
        try:
            for call in iter(self._calls.get, None):
                call()
        except Exception as error:
            self._error = error
            with suppress(Exception):
                self._run.finish(exit_code=1)


def _end_service() -> None:
    # At exit, wandb's exit function, which torch_world.py also runs, would wait forever for the service process.
    for process in psutil.Process().children():
        if process.name() == SERVICE:
            process.kill()
    with suppress(Exception, SystemExit):  # teardown fails, because the service process was killed
        wandb.teardown()  # unregisters the exit function


def read_run_id(folder: Path) -> str | None:
    """Return the id of the W&B run in an output folder; None if there is no such run. Raises OSError."""
    try:
        return convert(read_json(folder / RUN_ID), dict[str, str]).get("wandb")
    except (FileNotFoundError, ValueError):  # ValueError: the file is damaged, so the run gets a new id
        return None
