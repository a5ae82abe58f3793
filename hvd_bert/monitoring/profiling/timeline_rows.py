"""The content of a timeline in columns: negotiations, operations, messages, activities."""

from __future__ import annotations

from dataclasses import dataclass

from hvd_bert.monitoring.profiling.byte_parser import Array

NONE = -1  # none, or unknown


@dataclass
class Negotiations:
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
class Operations:
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
class Messages:
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
class Activities:
    """A row per message and activity. Times in us."""

    code: Array
    start: Array
    end: Array


@dataclass
class Batch:
    """Everything that ended before some position of the file."""

    negotiations: Negotiations
    operations: Operations
    messages: Messages
    activities: Activities
