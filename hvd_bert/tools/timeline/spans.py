"""Turn events into operations: which tensors were sent in one message, and when they were ready, sent and received.

A tensor goes through NEGOTIATE_ALLREDUCE (from the first rank that is ready to the last, with a tick per rank), then
ALLREDUCE, which contains activities: MEMCPY_IN_FUSION_BUFFER, MPI_ALLREDUCE, ... (common.h). Tensors that share a
buffer begin the collective's activity together: all B, then all E. Negotiations by the response cache have no ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_bert.tools.timeline.events import BEGIN, END, NONE, TICK, Array, Events, Groups, Table

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


def span_kind(name: str) -> int:
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

    def rows(self, *kinds: int) -> Array:
        return np.flatnonzero(np.isin(self.kind, kinds))


def find_spans(events: Events, names: Sequence[str]) -> Spans:
    """The spans of a file's events, in the file's order. `names`: by code."""
    order = np.argsort(events.pid, kind="stable")
    return _Work(events.only(order), order, np.array([span_kind(name) for name in names], np.int8)).spans()


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
            lasting = np.delete(lasting, np.concatenate([pair, pair + 1]))
        begin, end = np.concatenate(begins), np.concatenate(ends)
        code = events.code[begin]
        self.pairs = _Pairs(begin, end, code, kinds[code]).only(np.argsort(begin))
        opened = kinds[events.code[lasting[events.phase[lasting] == BEGIN]]]
        self.unfinished = int(np.isin(opened, (NEGOTIATION, OPERATION)).sum())

    def spans(self) -> Spans:
        """All spans that have an end."""
        pairs, ts = self.pairs, self.events.ts
        negotiations = self._negotiations(pairs.rows(NEGOTIATION))
        rows = pairs.rows(OPERATION)
        inside = pairs.rows(ACTIVITY, COLLECTIVE)
        parent = np.searchsorted(pairs.begin[rows], pairs.begin[inside]) - 1
        has = parent >= 0
        has[has] = pairs.end[rows[parent[has]]] > pairs.end[inside[has]]
        inside, parent = inside[has], parent[has]
        message, collective = self._number_messages(rows, inside, parent)
        operations = Operations(
            code=pairs.code[rows],
            pid=self.events.pid[pairs.begin[rows]],
            start=ts[pairs.begin[rows]],
            end=ts[pairs.end[rows]],
            message=message,
            negotiation=self._negotiation_before()[rows],
            size=self.events.size[pairs.end[rows]],
        )
        activities, sender = self._activities(inside, message[parent])
        messages = self._messages(operations, negotiations, collective)
        sending = np.flatnonzero(self.kinds[activities.code] == COLLECTIVE)
        np.minimum.at(messages.sent, sender[sending], activities.start[sending])
        np.maximum.at(messages.received, sender[sending], activities.end[sending])
        file_order = np.argsort(self.order[pairs.begin[rows]])
        return Spans(negotiations, operations.only(file_order), messages, activities, self.unfinished)

    def _negotiations(self, rows: Array) -> Negotiations:
        begin, end = self.pairs.begin[rows], self.pairs.end[rows]
        ts, ticks = self.events.ts, end - begin - 1
        known = ticks > 0
        lag = np.where(known, ts[end - 1] - ts[np.minimum(begin + 1, len(ts) - 1)], 0)
        last = np.where(known, self.events.code[end - 1], NONE)
        return Negotiations(self.pairs.code[rows], self.events.pid[begin], ts[begin], ts[end], ticks, lag, last)

    def _negotiation_before(self) -> Array:
        """For each span: the number of the negotiation that is the span before it on the same tensor, or NONE.

        Activities are inside of operations and do not count.
        """
        number, before = np.full(len(self.pairs), NONE), np.full(len(self.pairs), NONE)
        negotiating = self.pairs.rows(NEGOTIATION)
        number[negotiating] = np.arange(len(negotiating))
        whole = self.pairs.rows(NEGOTIATION, OPERATION)
        pid = self.events.pid[self.pairs.begin[whole]]
        same = np.flatnonzero(pid[1:] == pid[:-1]) + 1
        before[whole[same]] = number[whole[same - 1]]
        return before

    def _number_messages(self, rows: Array, inside: Array, parent: Array) -> tuple[Array, Array]:
        """The message number of each operation, and the collective's code of each message.

        Tensors of a message begin its collective together, so the first B after an E begins a message:

            tensor    a b a b c c
            event     B B E E B E
            message   0 0     1
        """
        message, code = np.full(len(rows), NONE), np.full(len(rows), NONE)
        sending = np.flatnonzero(self.pairs.kind[inside] == COLLECTIVE)
        sending = sending[np.flatnonzero(np.diff(parent[sending], prepend=NONE) != 0)]  # the first of each operation
        spans, owner, total = inside[sending], parent[sending], 0
        for kind in np.unique(self.pairs.code[spans]).tolist():
            own = np.flatnonzero(self.pairs.code[spans] == kind)
            ends = (self.pairs.begin[spans[own]], self.pairs.end[spans[own]])
            sort = np.argsort(self.order[np.concatenate(ends)])
            is_begin = sort < len(own)
            fresh = np.diff(is_begin.astype(np.int8), prepend=0) == 1
            number = total + np.cumsum(fresh) - 1
            operations = owner[own[sort[is_begin]]]
            message[operations], code[operations] = number[is_begin], kind
            total += int(fresh.sum())
        alone = np.flatnonzero(message == NONE)
        message[alone] = total + np.arange(len(alone))
        begun = Groups(message).min(self.order[self.pairs.begin[rows]])
        message = np.argsort(np.argsort(begun))[message]  # in the order in which they began
        collective = np.full(len(begun), NONE)
        collective[message] = code
        return message, collective

    def _activities(self, inside: Array, message: Array) -> tuple[Activities, Array]:
        """One row per message and activity, shared by its tensors; and the message of each row."""
        code = self.pairs.code[inside].astype(np.int64)
        groups = Groups(message * (len(self.kinds) + 1) + code)
        # Writing 200 events takes time. The activity itself is between the last B and the first E.
        latest = groups.max(self.events.ts[self.pairs.begin[inside]])
        earliest = groups.min(self.events.ts[self.pairs.end[inside]])
        return Activities(code[groups.first_row], latest, np.maximum(latest, earliest)), message[groups.first_row]

    def _messages(self, rows: Operations, past: Negotiations, collective: Array) -> Messages:
        """`received`: not known yet, and neither is `sent` of the messages with a collective."""
        groups = Groups(rows.message)
        seen, ready = rows.start.copy(), rows.start.copy()
        known = np.flatnonzero(rows.negotiation != NONE)
        seen[known], ready[known] = past.start[rows.negotiation[known]], past.end[rows.negotiation[known]]
        start, end = groups.min(rows.start), groups.max(rows.end)
        return Messages(
            code=rows.code[groups.first_row],
            collective=collective,
            tensors=groups.size,
            size=np.where(groups.min(rows.size) < 0, NONE, groups.sum(rows.size)),
            seen=groups.max(seen),
            ready=groups.max(ready),
            start=start,
            end=end,
            sent=np.where(collective == NONE, start, end),
            received=start.copy(),
        )
