"""The reporters of `--report_to`: their interface, the thread in which each works, and the run's id at a library."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from hvd_bert.config.training import REPORTERS
from hvd_bert.distributed.logs import log
from hvd_bert.errors import UserError, reason_of
from hvd_bert.storage import written
from hvd_bert.storage.reading import convert, read_json
from hvd_bert.storage.writing import write_json

Settings = Mapping[str, str | int | float | bool]
RUN_IDS = "tracking.json"  # the id at wandb: a resumed run is the same run there
Samples = Sequence[Mapping[str, Any]]  # of eval_samples.json


class Reporter(ABC):
    """Sends what rank 0 records to one library. A method may raise any error: `Background` reports it."""

    title: ClassVar[str]

    @classmethod  # noqa: B027  most libraries need neither a server nor an account
    def check(cls) -> None:
        """Raise UserError if the library would refuse a run. Changes nothing."""

    def resumed(self, step: int) -> None:  # noqa: B027  most libraries need not know
        """The run resumes from the checkpoint of this step. The first call, if at all."""

    @abstractmethod
    def settings(self, settings: Settings) -> None:
        """The run's settings, once per start."""

    @abstractmethod
    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Values of a step. A name has a group, as in train/loss."""

    @abstractmethod
    def samples(self, step: int, samples: Samples) -> None:
        """Sample answers of an evaluation."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """The end. `finished`: the run has done all its work, so it is not to be resumed."""

    def abandon(self) -> None:  # noqa: B027  a thread alone does not keep the process from ending
        """Another thread's call does not return: stop whatever would keep the process from ending."""


class Background:
    """Calls a reporter in a thread of its own, so that training never waits for a server or a disk.

    After an error it warns once, closes the reporter and calls it no more.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._title = reporter, reporter.title
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._failed = self._closing = False
        self._thread = threading.Thread(target=self._run, name=self._title, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Queue a method call; "close" is the last."""
        self._closing = method == "close"
        if not self._failed:
            self._calls.put((method, arguments))

    def end_close(self, deadline: float) -> None:
        """Wait for the reporter until `deadline`, in time.monotonic()'s seconds."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail("it has not taken everything in time")
            with suppress(Exception):
                self._reporter.abandon()

    def _run(self) -> None:
        method = ""
        try:
            while method != "close" and not self._failed:
                method, arguments = self._calls.get()
                getattr(self._reporter, method)(*arguments)
        except Exception as error:
            self._fail(getattr(error, "strerror", None) or reason_of(error))
        if method != "close":
            with suppress(Exception):  # the first error is the reason
                self._reporter.close(False)

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            effect = "Its last values may be missing." if self._closing else "Training continues."
            log.warning("%s cannot be written: %s. %s", self._title, reason, effect)


PATIENCE_S = 30.0  # at the end of a run, for all reporters together
PATIENCE_UNFINISHED_S = 5.0  # a scheduler may give a stopped run little time


def close(reporters: Sequence[Background], finished: bool) -> None:
    """Close reporters, and wait for them, but not long."""
    for reporter in reporters:
        reporter.call("close", finished)
    deadline = time.monotonic() + (PATIENCE_S if finished else PATIENCE_UNFINISHED_S)
    for reporter in reporters:
        reporter.end_close(deadline)


def check(names: Sequence[str]) -> None:
    """Raise UserError if a reporter's package, which has its name, is not installed, or if it would refuse a run."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # wandb's own output, a folder of its name, has no origin
            raise UserError(f"--report_to {name}: the package {name} is not installed. Run `pip install {name}`.")
    for name in names:
        _class(name).check()


def start(names: Sequence[str], folder: Path) -> list[Background]:
    """Start the reporters of a run. Raises OSError if a file cannot be written, and UserError if a library refuses."""
    return [Background(_class(name)(folder)) for name in names]


def _class(name: str) -> Any:
    module, _, class_name = REPORTERS[name].partition(":")
    return getattr(import_module(module), class_name)


def read_run_id(folder: Path, library: str) -> str | None:
    """The run's id at a library; None if it has none yet. Raises OSError."""
    try:
        return convert(read_json(folder / RUN_IDS), dict[str, str]).get(library)
    except (FileNotFoundError, ValueError):  # damaged: the run gets a new id
        return None


def keep_run_id(folder: Path, library: str, run_id: str) -> None:
    """Keep the run's id at a library. Raises OSError."""
    written.add(folder, RUN_IDS)
    write_json(folder / RUN_IDS, {library: run_id})
