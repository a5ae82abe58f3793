"""Prefetching: prepares the next batches and copies them to the device while the current one is trained on."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hvd_bert.data.batch_plan import BatchPlan, Ids

AHEAD = 2  # batches to prefetch


class Prefetcher:
    """A rank's batches in the plan's order, starting at optimizer step `first`."""

    def __init__(self, plan: BatchPlan, collate: Callable[[Ids], Any], rank: int, first: int) -> None:
        self.plan = plan
        self.rank = rank
        self._collate = collate
        self._ids = (ids for step in itertools.count(first) for ids in plan.rank_windows(step, rank))
        self._next = first
        self._ahead: deque[Future[Any]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._fill()  # a step that cannot be shared out fails here, before training starts

    def of_step(self, step: int) -> Iterator[Any]:
        """The micro-batches of a step. Steps must be requested in order."""
        assert step == self._next, f"step {step} instead of {self._next}"
        self._next += 1
        for _ in range(self.plan.accumulation):
            self._fill()
            yield self._ahead.popleft().result()

    def _fill(self) -> None:
        while len(self._ahead) <= AHEAD:
            self._ahead.append(self._pool.submit(self._collate, next(self._ids)))

    def close(self) -> None:
        """Discard the prefetched batches."""
        self._pool.shutdown(cancel_futures=True)
