"""Turn events into operations, operations into messages, and messages into training steps.

A tensor goes through NEGOTIATE_ALLREDUCE (from the first ready rank to the last, with a tick per rank), then
ALLREDUCE, which contains activities: MEMCPY_IN_FUSION_BUFFER, MPI_ALLREDUCE, ... (common.h). Tensors that share a
buffer begin the collective's activity together: all B, then all E. Negotiations that Horovod answers from its response
cache have no ticks.

A step begins with the first tensor that was already allreduced in the step before. Communication after the step's last
tensor was ready on all ranks is *exposed*: the backward pass is over, and the step waits. Earlier communication is
hidden behind the backward pass. Over MPI, Gloo and oneCCL, one thread both negotiates and sends. While the thread is
sending, it does not notice that a tensor becomes ready, so exposed communication is known only within two bounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise

from hvd_bert.tools.timeline.events import BEGIN, NONE, TICK, Event

REDUCTIONS = ("ALLREDUCE", "ADASUM", "REDUCESCATTER")
OPERATIONS = (*REDUCTIONS, "ALLGATHER", "BROADCAST", "ALLTOALL")
COLLECTIVES = ("ALLREDUCE", "ALLGATHER", "BCAST", "ALLTOALL", "REDUCESCATTER", "REDUCE")
NEGOTIATION, OPERATION, COLLECTIVE, OTHER = "negotiation", "operation", "collective", "other"
ASYNCHRONOUS = "NCCL_"  # prefix of collectives whose end another thread waits for
AT_ONCE_US = 5000  # a negotiation this soon after a message may have waited for the sending thread
SMALL = 0.01  # share of a step's bytes: a smaller message after the gradients is a loss or a metric


@cache
def span_kind(name: str) -> str:
    """Return the kind of a span, by its name; OTHER for names that Horovod does not use."""
    if name.startswith("NEGOTIATE_"):
        return NEGOTIATION
    if name in OPERATIONS:
        return OPERATION
    if "_" in name and name.endswith(COLLECTIVES):
        return COLLECTIVE
    if not (name.isupper() and name.replace("_", "").isalnum()):
        return OTHER
    kinds = {"QUEUE": "queue", "WAIT": "wait", "MEMCPY": "copy", "COPY": "copy"}
    return next((kind for start, kind in kinds.items() if name.startswith(start)), "set-up")


@dataclass(slots=True)
class Span:
    """A tensor's negotiation, operation or activity. Times in us; `end` is NONE for a span without an end."""

    name: str
    start: int
    end: int = NONE


@dataclass(slots=True)
class Negotiation(Span):
    """A negotiation. `ticks`: number of its ticks; each names a rank. `lag`: us from the first to the last tick.

    `last_rank`: rank of the last tick.
    """

    ticks: int = 0
    first_tick: int = 0
    lag: int = 0
    last_rank: int = NONE

    def tick(self, ts: int, rank: int) -> None:
        """Record that a rank has become ready."""
        self.first_tick = self.first_tick if self.ticks else ts
        self.ticks, self.lag, self.last_rank = self.ticks + 1, ts - self.first_tick, rank


@dataclass(slots=True)
class Operation(Span):
    """The operation of a tensor. `negotiation`: the tensor's negotiation before it. `message`: number of the message
    that contains the tensor. `size`: bytes, NONE if unknown. `collective`: name of the operation's first collective."""

    pid: int = NONE
    negotiation: Negotiation | None = None
    message: int = NONE
    size: int = NONE
    collective: str = ""
    activities: list[Span] = field(default_factory=list)


def find_operations(events: Iterable[Event]) -> tuple[list[Negotiation], list[Operation]]:
    """Find all negotiations and operations, in the order in which they began.

    The tensors of a message begin the collective together, so the first B after an E begins the next message:

        tensor    a b a b c c
        event     B B E E B E
        message   0 0     2
    """
    negotiations: list[Negotiation] = []
    operations: list[Operation] = []
    opened: defaultdict[int, list[Span]] = defaultdict(list)  # by tensor
    negotiated: dict[int, Negotiation] = {}  # by tensor, until its operation begins
    sending: dict[str, int] = {}  # collective -> number of its message, until the message's first E
    for phase, name, ts, pid, size in events:
        stack = opened[pid]
        top = stack[-1] if stack else None  # None: the span began before the recording
        if phase == BEGIN:
            kind = span_kind(name)
            if kind in (NEGOTIATION, OPERATION):
                stack.clear()  # remove spans without an end
            if kind == NEGOTIATION:
                negotiations.append(Negotiation(name, ts))
                stack.append(negotiations[-1])
            elif kind == OPERATION:
                before = negotiated.pop(pid, None)
                operations.append(Operation(name, ts, pid=pid, negotiation=before, message=len(operations)))
                stack.append(operations[-1])
            else:
                stack.append(Span(name, ts))
                if kind == COLLECTIVE and isinstance(top, Operation) and not top.collective:
                    top.collective, top.message = name, sending.setdefault(name, top.message)
        elif phase == TICK:
            if isinstance(top, Negotiation):
                top.tick(ts, int(name))
        elif top is not None:
            stack.pop()
            top.end = ts
            if isinstance(top, Negotiation):
                negotiated[pid] = top
            elif isinstance(top, Operation):
                top.size = size
            elif stack and isinstance(stack[-1], Operation) and span_kind(top.name) != OTHER:
                stack[-1].activities.append(top)
                sending.pop(top.name, None)
    return negotiations, operations


class Message:
    """Tensors that were sent together. Times in us.

    `seen`: time by which each tensor was ready on at least one rank; `ready`: on all ranks. `start` and `end`: of the
    operation, with copies; `sent` and `received`: of the collective only. `size`: bytes, NONE if unknown. `activities`:
    name -> start and end. `named`: number of tensors whose negotiations name ranks. `latest`: the negotiation with the
    largest lag among those that name ranks.
    """

    def __init__(self, operations: list[Operation]) -> None:
        self.name, self.collective = operations[0].name, operations[0].collective
        self.pids = {operation.pid for operation in operations}
        self.tensors = len(operations)
        sizes = [operation.size for operation in operations]
        self.size = NONE if NONE in sizes else sum(sizes)
        self.seen = max((operation.negotiation or operation).start for operation in operations)
        self.ready = max(row.negotiation.end if row.negotiation else row.start for row in operations)
        self.start = min(operation.start for operation in operations)
        self.end = max(operation.end for operation in operations)
        self.activities: dict[str, tuple[int, int]] = {}
        for span in chain.from_iterable(operation.activities for operation in operations):
            # Horovod takes time to write an event per tensor: the activity is between the last B and the first E.
            start, end = self.activities.get(span.name, (span.start, span.end))
            self.activities[span.name] = max(start, span.start), min(end, span.end)
        sent = [times for name, times in self.activities.items() if span_kind(name) == COLLECTIVE]
        self.sent = min([self.end, *(start for start, _ in sent)])
        self.received = max([self.start, *(max(times) for times in sent)])
        named = [row.negotiation for row in operations if row.negotiation and row.negotiation.ticks > 1]
        self.named, self.latest = len(named), _latest(named)


def _latest(negotiations: list[Negotiation]) -> Negotiation | None:
    """Return the negotiation with the largest lag; among equal lags, the last; None without negotiations."""
    return max(reversed(negotiations), key=lambda negotiation: negotiation.lag, default=None)


def find_messages(operations: list[Operation]) -> list[Message]:
    """Group the finished operations into messages, in the order in which the messages began."""
    together = defaultdict(list)
    for operation in operations:
        if operation.end != NONE:
            together[operation.message].append(operation)
    return [Message(tensors) for tensors in together.values()]


class Step:
    """The messages of a training step. Times in us.

    `number`: the step's position in the file (0, 1, ...). `start`: the earliest `Message.seen` of its
    messages. `busy`: time with a message in flight. `exposed_min` and `exposed_max`: bounds of the exposed
    time. `wait`: time at the step's end in which the first rank waits for the last. `latest`: the negotiation with the
    largest lag; None unless the negotiations of at least half of the tensors name ranks.
    """

    def __init__(self, number: int, messages: list[Message], free: int) -> None:
        """`free`: time at which all messages of earlier steps had ended."""
        self.number = number
        self.start = min(message.seen for message in messages)
        self.messages, self.tensors = len(messages), sum(message.tensors for message in messages)
        self.size = sum(max(message.size, 0) for message in messages)
        ready = max(message.ready for message in messages)
        seen = min(max(message.seen for message in messages), ready)
        earliest = min(_earliest_ready(messages, seen), ready)
        self.wait = ready - seen
        self.busy = self.exposed_min = self.exposed_max = 0
        for message in messages:
            start, end = max(message.start, free), message.end  # overlapping messages count once
            self.busy += max(0, end - start)
            self.exposed_min += max(0, end - max(start, ready))
            self.exposed_max += max(0, end - max(start, earliest))
            free = max(free, end)
        enough = 2 * sum(message.named for message in messages) >= self.tensors
        self.latest = _latest([message.latest for message in messages if message.latest and enough])


def find_steps(messages: list[Message]) -> list[Step]:
    """Group the messages of REDUCTIONS into training steps, without up to three trailing losses or metrics per step."""
    steps: list[list[Message]] = []
    reduced: set[int] = set()
    for message in messages:
        if message.name in REDUCTIONS:
            if not steps or reduced & message.pids:
                steps.append([])
                reduced = set()
            steps[-1].append(message)
            reduced |= message.pids
    for _ in range(3):
        _drop_trailing(steps)
    found, free = [], 0
    for number, step in enumerate(steps):
        found.append(Step(number, step, free))
        free = max(free, *(message.end for message in step))
    return found


def _drop_trailing(steps: list[list[Message]]) -> None:
    """Remove each step's last message if it is small and became ready only after all earlier messages had ended."""
    received = 0
    for step in steps:
        last = step[-1]
        received = max([received, *(message.end for message in step[:-1])])
        small = 0 <= last.size < SMALL * sum(message.size for message in step)
        if len(step) > 1 and small and last.seen >= received:
            step.pop()
        received = max(received, last.end)


def _earliest_ready(messages: list[Message], seen: int) -> int:
    """Return the earliest time at which a step's last tensor can have been ready on the first rank.

    `seen`: time at which Horovod noticed the tensor. A negotiation yields a list of messages. While the thread sends
    them one by one, it does not notice new tensors:

        list       |   1   |    2    |
        message    |-a-|-b-||-c-|-d-|      c's and d's tensors can have been ready since a was sent
    """
    lists = [messages[:1]]
    for before, message in pairwise(messages):
        if message.ready > before.start:
            lists.append([])
        lists[-1].append(message)
    if len(lists) == 1:
        return seen
    first, last = lists[-2][0], lists[-2][-1]
    synchronous = last.collective and not last.collective.startswith(ASYNCHRONOUS)
    return first.start if synchronous and seen - last.end <= AT_ONCE_US else seen
