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

from hvd_bert.tools.timeline.events import NONE, Array, Table
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


def steps_of(spans: Spans, names: Sequence[str]) -> StepTable | None:
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
    return _table(sent, waiting[sent.collective] & (sent.collective != NONE), _by_step(sent))


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
    lag = np.zeros(len(spans.messages.code), np.int64)
    last_rank = np.full(len(lag), NONE)
    negotiation = spans.operations.negotiation[rows]
    message, negotiation = message[negotiation != NONE], negotiation[negotiation != NONE]
    named = spans.negotiations.ticks[negotiation] > 1
    message, negotiation = message[named], negotiation[named]
    sort = np.lexsort((spans.negotiations.lag[negotiation], message))
    lag[message[sort]] = spans.negotiations.lag[negotiation[sort]]  # the largest comes last and wins
    last_rank[message[sort]] = spans.negotiations.last_rank[negotiation[sort]]
    return lag, last_rank, np.bincount(message, minlength=len(lag))


def _by_step(sent: _Sent) -> tuple[Array, Array]:
    """The largest lag of each step and its last rank, if at least half of the step's tensors name ranks."""
    sort = np.lexsort((sent.lag, sent.last_rank != NONE, sent.step))
    last = np.flatnonzero(np.diff(sent.step[sort], append=-1) != 0)
    first = np.flatnonzero(np.diff(sent.step, prepend=-1) != 0)
    known = 2 * np.add.reduceat(sent.named, first) >= np.add.reduceat(sent.tensors, first)
    return np.where(known, sent.lag[sort[last]], 0), np.where(known, sent.last_rank[sort[last]], NONE)


def _without_trailing(sent: _Sent) -> _Sent:
    """Remove a step's last message if it is small and became ready only after all others were received."""
    last = np.diff(sent.step, append=-1) != 0
    first = np.diff(sent.step, prepend=-1) != 0
    total = np.add.reduceat(sent.size, np.flatnonzero(first))[np.cumsum(first) - 1]
    back = np.maximum.accumulate(sent.end)
    apart = np.zeros(len(last), bool)
    apart[1:] = sent.seen[1:] >= back[:-1]
    return sent.only(np.flatnonzero(~(last & ~first & apart & (sent.size >= 0) & (sent.size < SMALL * total))))


def _table(sent: _Sent, synchronous: Array, lags: tuple[Array, Array]) -> StepTable:
    is_first = np.diff(sent.step, prepend=-1) != 0
    first = np.flatnonzero(is_first)
    row = np.cumsum(is_first) - 1
    last = np.append(first[1:], len(row)) - 1
    back = np.maximum.accumulate(sent.end)
    start = sent.start.copy()
    start[1:] = np.maximum(start[1:], back[:-1])  # overlapping messages count once
    ready = np.maximum.reduceat(sent.ready, first)
    seen = np.minimum(np.maximum.reduceat(sent.seen, first), ready)
    # Messages that were negotiated together: the thread sent them one by one, and noticed no new tensor meanwhile.
    fresh = is_first.copy()
    fresh[1:] |= sent.ready[1:] > sent.start[:-1]
    list_start = np.maximum.accumulate(np.where(fresh, np.arange(len(row)), 0))
    before = list_start[last] - 1
    has = (before >= first) & synchronous[before] & (seen - sent.end[before] <= AT_ONCE_US)
    earliest = np.where(has, sent.start[list_start[before]], seen)

    def after(moment: Array) -> Array:
        each = np.maximum(0, sent.end - np.maximum(start, moment[row]))
        total: Array = np.add.reduceat(each, first)
        return total

    return StepTable(
        number=sent.step[first],
        start=np.minimum.reduceat(sent.seen, first),
        tensors=np.add.reduceat(sent.tensors, first),
        messages=last - first + 1,
        size=np.add.reduceat(np.maximum(sent.size, 0), first),
        busy=np.add.reduceat(np.maximum(0, sent.end - start), first),
        exposed_min=after(ready),
        exposed_max=after(np.minimum(earliest, ready)),
        wait=ready - seen,
        lag=lags[0],
        last_rank=lags[1],
    )
