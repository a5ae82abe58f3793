"""Group messages into training steps: when the last gradient was ready, and what was sent before and after that.

A step begins with the first tensor that was already allreduced in the step before. Communication after the step's last
tensor was ready on all ranks is *exposed*: the backward pass is over, and the step waits for it. Earlier communication
is hidden behind the backward pass. Over MPI, Gloo and oneCCL one thread both negotiates and sends. It notices late that
a tensor became ready while it was sending, so exposed communication is only known between two bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_bert.tools.timeline.events import NONE, Array, Groups, Table
from hvd_bert.tools.timeline.spans import Messages, Spans

REDUCTIONS = ("ALLREDUCE", "ADASUM", "REDUCESCATTER")
ASYNCHRONOUS = "NCCL_"  # collectives that another thread waits for
AT_ONCE_US = 5000  # a negotiation this soon after a message may have waited for the thread that sent it
SMALL = 0.01  # of a step's bytes: a smaller message after the gradients is a loss or a metric
FULL = 0.5  # of the usual number of tensors: a step with fewer is not a training step


@dataclass
class StepTable(Table):
    """A row per step. Times in us. `number`: 0, 1, ... in the file; a table may leave some out.
    `start`: when its first tensors were ready. `busy`: time with a message in flight.
    `exposed_min` and `exposed_max`: bounds of the exposed time. `wait`: of the first rank for the last, at the end.
    `lag`: largest time between a tensor's first and last rank; `last_rank`: the last rank then (NONE if not named)."""

    number: Array
    start: Array
    tensors: Array
    messages: Array
    size: Array
    busy: Array
    exposed_min: Array
    exposed_max: Array
    wait: Array
    lag: Array
    last_rank: Array

    def times(self) -> Array:
        """From start to start, of the steps that are followed by the next one of the file."""
        rows = np.flatnonzero(np.diff(self.number) == 1)
        return self.start[rows + 1] - self.start[rows]


@dataclass
class _Sent(Messages):
    """Messages of reductions with their step and their tensors' lag. `named`: number of tensors with a known lag."""

    step: Array
    lag: Array
    last_rank: Array
    named: Array


def find_steps(spans: Spans, names: Sequence[str]) -> StepTable | None:
    """All steps; None if there are none. `names`: of spans by code."""
    reductions = [code for code, name in enumerate(names) if name in REDUCTIONS]
    rows = np.flatnonzero(np.isin(spans.operations.code, reductions))
    if not len(rows):
        return None
    message = spans.operations.message[rows]
    starts = message[_boundaries(spans.operations.pid[rows])]
    lag, last_rank, named = _lags(spans, rows, message)
    picked = np.flatnonzero(np.isin(spans.messages.code, reductions))
    step = np.searchsorted(starts, picked, side="right")
    messages = vars(spans.messages.only(picked))
    sent = _Sent(**messages, step=step, lag=lag[picked], last_rank=last_rank[picked], named=named[picked])
    for _ in range(3):
        sent = _without_trailing(sent)
    waiting = np.array([not name.startswith(ASYNCHRONOUS) for name in names])
    return _make_table(sent, waiting[sent.collective] & (sent.collective != NONE))


def _boundaries(pid: Array) -> Array:
    """The operations that begin a step, after the first step. `pid`: the tensor of each operation."""
    sort = np.argsort(pid, kind="stable")
    same = np.flatnonzero(pid[sort][1:] == pid[sort][:-1]) + 1
    before = np.full(len(pid), NONE)
    before[sort[same]] = sort[same - 1]
    latest = np.maximum.accumulate(before)
    found = [0]
    while (at := int(np.searchsorted(latest, found[-1]))) < len(pid):
        found.append(at)
    return np.array(found[1:], np.int64)


def _lags(spans: Spans, rows: Array, message: Array) -> tuple[Array, Array, Array]:
    """Per message: the largest lag of its tensors, the last rank (NONE if unknown), and how many tensors name ranks."""
    count = len(spans.messages)
    lag, last_rank = np.zeros(count, np.int64), np.full(count, NONE)
    negotiation = spans.operations.negotiation[rows]
    message, negotiation = message[negotiation != NONE], negotiation[negotiation != NONE]
    named = spans.negotiations.ticks[negotiation] > 1
    message, negotiation = message[named], negotiation[named]
    sort = np.argsort(spans.negotiations.lag[negotiation], kind="stable")
    message, negotiation = message[sort], negotiation[sort]
    largest = Groups(message).last_row
    lag[message[largest]] = spans.negotiations.lag[negotiation[largest]]
    last_rank[message[largest]] = spans.negotiations.last_rank[negotiation[largest]]
    return lag, last_rank, np.bincount(message, minlength=count)


def _without_trailing(sent: _Sent) -> _Sent:
    """Remove a step's last message if it is small and became ready only after all others were received."""
    steps = Groups(sent.step)
    last = steps.last_row
    received = np.maximum.accumulate(sent.end)[last - 1]
    small = (sent.size[last] >= 0) & (sent.size[last] < SMALL * steps.sum(sent.size))
    trailing = last[(steps.size > 1) & (sent.seen[last] >= received) & small]
    return sent.only(np.delete(np.arange(len(sent)), trailing))


def _make_table(sent: _Sent, synchronous: Array) -> StepTable:
    """`synchronous`: which messages were sent by the thread that negotiates."""
    steps = Groups(sent.step)
    start = sent.start.copy()
    start[1:] = np.maximum(start[1:], np.maximum.accumulate(sent.end)[:-1])  # overlapping messages count once
    ready = steps.max(sent.ready)
    seen = np.minimum(steps.max(sent.seen), ready)
    earliest = _earliest_ready(sent, steps, synchronous, seen)

    def sent_after(moment: Array) -> Array:
        return steps.sum(np.maximum(0, sent.end - np.maximum(start, steps.of_rows(moment))))

    # The largest lag of each step and its last rank, if at least half of the step's tensors name ranks.
    by_lag = np.lexsort((sent.lag, sent.last_rank != NONE))
    largest = by_lag[Groups(sent.step[by_lag]).last_row]
    known = 2 * steps.sum(sent.named) >= steps.sum(sent.tensors)
    return StepTable(
        number=sent.step[steps.first_row],
        start=steps.min(sent.seen),
        tensors=steps.sum(sent.tensors),
        messages=steps.size,
        size=steps.sum(np.maximum(sent.size, 0)),
        busy=steps.sum(np.maximum(0, sent.end - start)),
        exposed_min=sent_after(ready),
        exposed_max=sent_after(np.minimum(earliest, ready)),
        wait=ready - seen,
        lag=np.where(known, sent.lag[largest], 0),
        last_rank=np.where(known, sent.last_rank[largest], NONE),
    )


def _earliest_ready(sent: _Sent, steps: Groups, synchronous: Array, seen: Array) -> Array:
    """When the last tensor of each step can have been ready on its first rank, at the earliest. `seen`: when Horovod
    noticed it.

    The thread that sends notices nothing meanwhile. It sends the messages of one negotiation, a list, one by one:

        list       |   1   |    2    |
        message    |-a-|-b-||-c-|-d-|      c's and d's tensors can have been ready since a was sent
    """
    row = np.arange(len(sent))
    begins_list = np.zeros(len(sent), bool)
    begins_list[steps.first_row] = True
    begins_list[1:] |= sent.ready[1:] > sent.start[:-1]
    list_start = np.maximum.accumulate(np.where(begins_list, row, 0))
    before = list_start[steps.last_row] - 1  # the last message of the list before the step's last one
    waited = (before >= steps.first_row) & synchronous[before] & (seen - sent.end[before] <= AT_ONCE_US)
    return np.where(waited, sent.start[list_start[before]], seen)
