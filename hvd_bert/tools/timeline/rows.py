"""The content of a timeline in columns: events; negotiations, operations, messages, activities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Self

Array = NDArray[Any]
NONE = -1  # none, or unknown


@dataclass
class Table:
    """Columns of the same length: each field is an array."""

    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))

    def only(self, rows: Array) -> Self:
        """Some of the rows, in the given order."""
        return type(self)(*(column[rows] for column in vars(self).values()))

    @classmethod
    def joined(cls, tables: Sequence[Self]) -> Self:
        """The rows of all tables."""
        columns = zip(*(vars(table).values() for table in tables), strict=True)
        return cls(*map(np.concatenate, columns))


@dataclass
class Events(Table):
    """A row per event, in the file's order.

    `phase`: BEGIN, END or TICK of events.py. `code`: the number in `Recording.names` of a BEGIN, the rank of a TICK.
    `ts`: microseconds. `pid`: the tensor. `size`: the tensor's bytes at the END of an operation, else NONE.
    """

    phase: Array
    code: Array
    ts: Array
    pid: Array
    size: Array


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
