"""The interface of a reporter, and the thread in which it works."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hvd_bert.distributed.logs import log
from hvd_bert.errors import reason_of

Settings = Mapping[str, str | int | float | bool]
Samples = Sequence[Mapping[str, Any]]  # of eval_samples.json


class Reporter(ABC):
    """Sends what rank 0 records to one library. A method may raise any error: `Background` reports it."""

    title: ClassVar[str]

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


class Background:
    """Calls a reporter in a thread of its own, so that training never waits for a server or a disk.

    After an error it warns once and calls the reporter no more.
    """

    PATIENCE_S = 30.0  # at the end of the run
    MAX_CALLS = 10_000  # that wait, for hours of logged steps

    def __init__(self, reporter: Reporter) -> None:
        self._title = reporter.title
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(self.MAX_CALLS)
        self._failed = False
        self._thread = threading.Thread(target=self._run, args=(reporter,), name=self._title, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Have a method called, after those before."""
        if self._failed:
            return
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            self._fail("it does not respond")

    def close(self, finished: bool) -> None:
        """Have the reporter closed, and wait for it, but not long."""
        self.call("close", finished)
        self._thread.join(0 if self._failed else self.PATIENCE_S)
        if self._thread.is_alive():
            self._fail(f"it has not taken everything within {self.PATIENCE_S:g} s")

    def _run(self, reporter: Reporter) -> None:
        method = ""
        try:
            while method != "close":
                method, arguments = self._calls.get()
                getattr(reporter, method)(*arguments)
        except Exception as error:
            self._fail(getattr(error, "strerror", None) or reason_of(error))

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("%s cannot be written: %s. Training continues.", self._title, reason)
