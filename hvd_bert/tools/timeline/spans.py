"""Turn events into operations: which tensors were sent in one message, and when they were ready, sent and received.

A tensor goes through NEGOTIATE_ALLREDUCE (from the first rank that is ready to the last, with a tick per rank), then
ALLREDUCE, which contains activities: MEMCPY_IN_FUSION_BUFFER, MPI_ALLREDUCE, ... (common.h). Tensors that share a
buffer begin the collective's activity together: all B, then all E. Negotiations by the response cache have no ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_bert.tools.timeline.events import BEGIN, END, NONE, TICK, Array, Events, Table

NEGOTIATE = "NEGOTIATE_"
OPERATIONS = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER", "ADASUM")
COLLECTIVES = ("ALLREDUCE", "ALLGATHER", "BCAST", "ALLTOALL", "REDUCESCATTER", "REDUCE")
ACTIVITY, NEGOTIATION, OPERATION, COLLECTIVE, OTHER = range(5)


@dataclass
class Negotiations(Table):
    """A row per tensor and negotiation. Times in us. `ticks`: number of ranks that it names. `lag`: from the first to
    the last of them. `last_rank`: the last of them (NONE without ticks)."""

    code: Array
    pid: Array
    start: Array
    end: Array
    ticks: Array
    lag: Array
    last_rank: Array


@dataclass
class Operations(Table):
    """A row per tensor and operation, in the order in which they began. `message`: the row in Messages.
    `negotiation`: the row in Negotiations, or NONE. `size`: bytes, NONE if unknown."""

    code: Array
    pid: Array
    start: Array
    end: Array
    message: Array
    negotiation: Array
    size: Array


@dataclass
class Messages(Table):
    """A row per collective, in the order in which they began. `tensors`: number of tensors sent together. Times in us.

    `seen`: when the last tensor was ready on the first rank; `ready`: on all ranks. `start` and `end`: of the operation
    with its copies; `sent` and `received`: of the collective only. `size`: bytes, NONE if unknown. `collective`: the
    code of its first activity, or NONE.
    """

    code: Array
    collective: Array
    tensors: Array
    size: Array
    seen: Array
    ready: Array
    start: Array
    end: Array
    sent: Array
    received: Array


@dataclass
class Activities(Table):
    """A row per message and activity. Times in us."""

    code: Array
    start: Array
    end: Array


@dataclass
class Spans:
    """All spans of a file that have an end. `unfinished`: number of operations and negotiations without one."""

    negotiations: Negotiations
    operations: Operations
    messages: Messages
    activities: Activities
    unfinished: int


def kind_of(name: str) -> int:
    """The kind of a span by its name; OTHER: not a tensor's."""
    if name.startswith(NEGOTIATE):
        return NEGOTIATION
    if name in OPERATIONS:
        return OPERATION
    if "_" in name and name.endswith(COLLECTIVES):
        return COLLECTIVE
    return ACTIVITY if name.replace("_", "").isalnum() and name.isupper() else OTHER


@dataclass
class _Pairs(Table):
    """Spans: positions of their B and E among the events sorted by tensor, their codes and kinds."""

    begin: Array
    end: Array
    code: Array
    kind: Array

    def of(self, *kinds: int) -> Array:
        return np.flatnonzero(np.isin(self.kind, kinds))


def spans_of(events: Events, names: Sequence[str]) -> Spans:
    """The spans of a file's events, in the file's order. `names`: by code."""
    order = np.argsort(events.pid, kind="stable")
    return _Work(events.only(order), order, np.array([kind_of(name) for name in names], np.int8)).spans()


class _Work:
    """`events` are sorted by tensor; `order` has their positions in the file."""

    def __init__(self, events: Events, order: Array, kinds: Array) -> None:
        self.events, self.order, self.kinds = events, order, kinds
        lasting = np.flatnonzero(events.phase != TICK)
        begins, ends = [], []
        for _ in range(2):  # activities and negotiations, then the spans around them
            phase, pid = events.phase[lasting], events.pid[lasting]
            pair = np.flatnonzero((phase[:-1] == BEGIN) & (phase[1:] == END) & (pid[:-1] == pid[1:]))
            begins.append(lasting[pair])
            ends.append(lasting[pair + 1])
            left = np.ones(len(lasting), bool)
            left[pair] = left[pair + 1] = False
            lasting = lasting[left]
        begin, end = np.concatenate(begins), np.concatenate(ends)
        sort = np.argsort(begin)
        begin, end = begin[sort], end[sort]
        code = events.code[begin]
        self.pairs = _Pairs(begin, end, code, kinds[code])
        opened = kinds[events.code[lasting[events.phase[lasting] == BEGIN]]]
        self.unfinished = int(np.isin(opened, (NEGOTIATION, OPERATION)).sum())

    def spans(self) -> Spans:
        """All spans that have an end."""
        pairs, ts = self.pairs, self.events.ts
        negotiating = pairs.of(NEGOTIATION)
        negotiations = self._negotiations(negotiating)
        rows = pairs.of(OPERATION)
        # The span before an operation on the same tensor is its negotiation.
        whole = pairs.of(NEGOTIATION, OPERATION)
        before = np.full(len(pairs.begin), NONE)
        number = np.full(len(pairs.begin), NONE)
        number[negotiating] = np.arange(len(negotiating))
        pid = self.events.pid[pairs.begin[whole]]
        same = np.flatnonzero(pid[1:] == pid[:-1]) + 1
        before[whole[same]] = number[whole[same - 1]]
        inside = pairs.of(ACTIVITY, COLLECTIVE)
        parent = np.searchsorted(pairs.begin[rows], pairs.begin[inside]) - 1
        has = parent >= 0
        has[has] = pairs.end[rows[parent[has]]] > pairs.end[inside[has]]
        inside, parent = inside[has], parent[has]
        message, collective = self._messages_of(rows, inside, parent)
        operations = Operations(
            pairs.code[rows], self.events.pid[pairs.begin[rows]], ts[pairs.begin[rows]], ts[pairs.end[rows]],
            message, before[rows], self.events.size[pairs.end[rows]],
        )  # fmt: skip
        activities, of_message = self._activities(inside, message[parent])
        messages = self._messages(operations, negotiations, collective)
        sending = np.flatnonzero(self.kinds[activities.code] == COLLECTIVE)
        np.minimum.at(messages.sent, of_message[sending], activities.start[sending])
        np.maximum.at(messages.received, of_message[sending], activities.end[sending])
        file_order = np.argsort(self.order[pairs.begin[rows]])
        return Spans(negotiations, operations.only(file_order), messages, activities, self.unfinished)

    def _negotiations(self, rows: Array) -> Negotiations:
        begin, end = self.pairs.begin[rows], self.pairs.end[rows]
        ts, ticks = self.events.ts, end - begin - 1
        known = ticks > 0
        lag = np.where(known, ts[end - 1] - ts[np.minimum(begin + 1, len(ts) - 1)], 0)
        last = np.where(known, self.events.code[end - 1], NONE)
        return Negotiations(self.pairs.code[rows], self.events.pid[begin], ts[begin], ts[end], ticks, lag, last)

    def _messages_of(self, rows: Array, inside: Array, parent: Array) -> tuple[Array, Array]:
        """The message number of each operation, and the collective's code of each message."""
        count = len(self.events)
        message, code = np.full(len(rows), NONE), np.full(len(rows), NONE)
        sending = self.pairs.kind[inside] == COLLECTIVE
        spans, owner = inside[sending], parent[sending]
        first = np.flatnonzero(np.diff(owner, prepend=NONE) != 0)
        spans, owner = spans[first], owner[first]
        total = 0
        for kind in np.unique(self.pairs.code[spans]).tolist():
            own = self.pairs.code[spans] == kind
            begin, end = self.order[self.pairs.begin[spans[own]]], self.order[self.pairs.end[spans[own]]]
            mark = np.zeros(count, np.int8)
            mark[begin], mark[end] = 1, 2
            places = np.flatnonzero(mark)
            begins = mark[places] == 1
            fresh = begins.copy()
            fresh[1:] &= ~begins[:-1]
            of_place = np.zeros(count, np.int64)
            of_place[places] = np.cumsum(fresh) - 1 + total
            message[owner[own]], code[owner[own]] = of_place[begin], kind
            total += int(fresh.sum())
        alone = np.flatnonzero(message == NONE)
        message[alone] = total + np.arange(len(alone))
        total += len(alone)
        # Number them in the order in which they began.
        start = np.full(total, count)
        np.minimum.at(start, message, self.order[self.pairs.begin[rows]])
        rank = np.empty(total, np.int64)
        rank[np.argsort(start)] = np.arange(total)
        message = rank[message]
        collective = np.full(total, NONE)
        collective[message] = code
        return message, collective

    def _activities(self, inside: Array, message: Array) -> tuple[Activities, Array]:
        """One row per message and activity, shared by its tensors; and the message of each row."""
        code = self.pairs.code[inside].astype(np.int64)
        key = message * (len(self.kinds) + 1) + code
        sort = np.argsort(key, kind="stable")
        key, rows = key[sort], inside[sort]
        first = np.flatnonzero(np.diff(key, prepend=NONE) != 0)
        begin, end = self.events.ts[self.pairs.begin[rows]], self.events.ts[self.pairs.end[rows]]
        # Writing 200 events takes time. The activity itself is between the last B and the first E.
        latest, earliest = np.maximum.reduceat(begin, first), np.minimum.reduceat(end, first)
        return Activities(code[sort][first], latest, np.maximum(latest, earliest)), message[sort][first]

    def _messages(self, rows: Operations, past: Negotiations, collective: Array) -> Messages:
        sort = np.argsort(rows.message, kind="stable")
        first = np.flatnonzero(np.diff(rows.message[sort], prepend=NONE) != 0)
        size, start, end = rows.size[sort], rows.start[sort], rows.end[sort]
        before = rows.negotiation[sort]
        known = before != NONE
        seen = np.where(known, past.start[before], start) if len(past.start) else start
        ready = np.where(known, past.end[before], start) if len(past.end) else start
        minimum = np.minimum.reduceat(size, first)
        starts, ends = np.minimum.reduceat(start, first), np.maximum.reduceat(end, first)
        return Messages(
            code=rows.code[sort][first],
            collective=collective,
            tensors=np.diff(first, append=len(sort)),
            size=np.where(minimum < 0, NONE, np.add.reduceat(size, first)),
            seen=np.maximum.reduceat(seen, first),
            ready=np.maximum.reduceat(ready, first),
            start=starts,
            end=ends,
            sent=np.where(collective == NONE, starts, ends),
            received=starts.copy(),
        )
