"""Batches made ahead: the next one is gathered and sent to the device while this one is trained on."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.data.collate import Batch, Collator

AHEAD = 2  # batches that wait while one is trained on


class Prefetcher:
    """A rank's batches in the plan's order, from optimizer step `first` on."""

    def __init__(self, plan: BatchPlan, collate: Collator, rank: int, first: int) -> None:
        self.plan = plan
        self.rank = rank
        self._collate = collate
        self._ids = (ids for step in itertools.count(first) for ids in plan.rank_windows(step, rank))
        self._next = first
        self._ahead: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")

    def of_step(self, step: int) -> Iterator[Batch]:
        """The batches of a step's passes; the steps must come one after the other."""
        assert step == self._next, f"step {step} instead of {self._next}"
        self._next += 1
        for _ in range(self.plan.accumulation):
            while len(self._ahead) <= AHEAD:
                self._ahead.append(self._pool.submit(self._collate, next(self._ids)))
            yield self._ahead.popleft().result()

    def close(self) -> None:
        """Forget what was made ahead."""
        self._pool.shutdown(cancel_futures=True)
