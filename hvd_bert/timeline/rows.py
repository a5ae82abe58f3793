"""What a timeline comes to, in columns: negotiations, operations, messages, their activities."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_bert.timeline.byte_parser import Array

NONE = -1  # where there is none, or it is not told


@dataclass
class Negotiations:
    """A row per tensor and negotiation. Times in us; `ticks`: ranks that are named in it, `lag` from the first to the
    last of them in us, `last_rank`: which (NONE without ticks)."""

    code: Array
    pid: Array
    start: Array
    end: Array
    ticks: Array
    lag: Array
    last_rank: Array


@dataclass
class Operations:
    """A row per tensor and operation, in the order they began. `message`: the row in Messages. `negotiation`: the row
    in Negotiations, or NONE. `size`: bytes, NONE if not told."""

    code: Array
    pid: Array
    start: Array
    end: Array
    message: Array
    negotiation: Array
    size: Array


@dataclass
class Messages:
    """A row per collective, whose `tensors` were sent together, in the order they began. Times in us.

    `seen`: when the last of them was ready on the first rank, `ready`: on all ranks. `start` and `end`: of the
    operation, copies and all; `sent` and `received`: of the collective alone. `size`: bytes, NONE if not told.
    `collective`: the code of its (first) activity, NONE if there was none.
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
class Activities:
    """A row per message and activity. Times in us."""

    code: Array
    start: Array
    end: Array


@dataclass
class Batch:
    """All that was over at some place of the file."""

    negotiations: Negotiations
    operations: Operations
    messages: Messages
    activities: Activities
