"""Read a timeline of Horovod 0.28 into arrays of events.

The format, from horovod/common/timeline.cc: a JSON array, which rank 0 writes for all ranks. A tensor is a "process":
two lines of metadata name its `pid`. Other events follow without line breaks, so most of a file is one line:

    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5780290, "pid": 47},{"ph": "X", "name": "1", "ts": ...}

`ts` is in microseconds. `B` and `E` begin and end a span; `E` has no name. The last `E` of an operation has the
tensor's dtype and shape. `X` means that rank 1 has become ready. `i` is the start of a cycle. After every event the
file ends with "]", which the next event overwrites. The file of a killed job may lack it and end within an event.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hvd_bert.errors import UserError
from hvd_bert.storage.reading import open_regular

if TYPE_CHECKING:
    from typing_extensions import Self

Array = NDArray[Any]
NONE = -1  # none, or unknown
BEGIN, END, TICK = ord("B"), ord("E"), ord("X")
BLOCK = 2 << 20  # bytes that are parsed at a time, since Python's objects take much more memory than the arrays
LONGEST_EVENT = 1 << 20  # bytes; nothing longer is an event
LARGEST = 2**50  # bytes of a tensor
CYCLE = "CYCLE_START"
_START = b'{"ph": "'
_EVENT = re.compile(
    rb'"ph": "(?:E|([BXi])", "name": "([^"]{0,200}))", "ts": (\d{1,15})(?=[,}])'
    rb'(?:, "pid": (\d{1,7})(?:\}|,(?: "args": \{"dtype": "(\w+)", "shape": "\[([\d, ]*)\]")?))?'
)
ITEM_BYTES = dict.fromkeys(("uint8", "int8", "bool"), 1) | dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2)
ITEM_BYTES |= dict.fromkeys(("int32", "float32", "uint32"), 4) | dict.fromkeys(("int64", "uint64", "float64"), 8)


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


class Groups:
    """The rows of a table by a key of at least 0: a figure of each group, in the order of the keys."""

    def __init__(self, key: Array) -> None:
        order = np.argsort(key, kind="stable")
        self._order, self._begin = order, np.flatnonzero(np.diff(key[order], prepend=NONE) != 0)
        self.size = np.diff(self._begin, append=len(order))
        self.first_row, self.last_row = order[self._begin], order[self._begin + self.size - 1]

    def min(self, column: Array) -> Array:
        """The minimum of each group."""
        return np.minimum.reduceat(column[self._order], self._begin)

    def max(self, column: Array) -> Array:
        """The maximum of each group."""
        return np.maximum.reduceat(column[self._order], self._begin)

    def sum(self, column: Array) -> Array:
        """The sum of each group."""
        return np.add.reduceat(column[self._order], self._begin)

    def of_rows(self, figures: Array) -> Array:
        """The figure of its group for each row."""
        found = np.empty(len(self._order), figures.dtype)
        found[self._order] = np.repeat(figures, self.size)
        return found


@dataclass
class Events(Table):
    """A row per event, in the file's order.

    `phase`: BEGIN, END or TICK. `code`: the number in `Recording.names` of a BEGIN, the rank of a TICK.
    `ts`: microseconds. `pid`: the tensor. `size`: the tensor's bytes at the END of an operation, else NONE.
    """

    phase: Array
    code: Array
    ts: Array
    pid: Array
    size: Array


@dataclass
class Recording:
    """The content of a file. `names`: of spans, by code. `ranks`: those that ticks name. `covered_us`: from the first
    event to the last. `cut_short`: the file has no "]" at its end."""

    names: list[str] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    covered_us: int = 0
    cut_short: bool = False
    _kinds: dict[tuple[bytes, bytes], int] = field(default_factory=lambda: {(b"", b""): END})

    def events(self, path: Path) -> Events:
        """The file's events, with a progress bar on a terminal. An incomplete event is left out. Raises UserError."""
        _check_start(path)
        blocks, rest = [], b""
        bar: dict[str, Any] = {"disable": None, "leave": False, "desc": path.name}
        with open_regular(path) as opened, tqdm.wrapattr(opened, "read", path.stat().st_size, **bar) as file:
            while chunk := file.read(BLOCK):
                data = rest + chunk
                end = max(data.rfind(_START), 0)
                blocks.append(self._parsed(data[:end]))
                rest = data[end:][-LONGEST_EVENT:]
        self.cut_short = not rest.rstrip(b"\n\r \0").endswith(b"}]")
        events = Events.joined([*blocks, self._parsed(rest)])
        self.covered_us = int(events.ts.max() - events.ts.min()) if len(events) else 0
        return events.only(np.flatnonzero((events.phase != 0) & (events.pid != NONE)))

    def _parsed(self, data: bytes) -> Events:
        """The events of a block; those that the analysis does not use have phase 0."""
        found = _EVENT.findall(data)
        phases, names, times, pids, types, shapes = zip(*found, strict=True) if found else ([],) * 6
        kinds = [self._kinds.get(key) or self._kind(*key) for key in zip(phases, names, strict=True)]
        code, phase = np.divmod(np.array(kinds, np.int32), 256)
        ts = np.array(list(map(int, times)), np.int64)
        pid = np.array([int(text) if text else NONE for text in pids], np.int32)
        sizes = [_tensor_bytes(dtype, shape) if dtype else NONE for dtype, shape in zip(types, shapes, strict=True)]
        return Events(phase.astype(np.uint8), code, ts, pid, np.array(sizes, np.int64))

    def _kind(self, phase: bytes, text: bytes) -> int:
        """256 times the code plus the phase of the events of a name; 0 for events that are in no row."""
        name, kind = text.decode("utf-8", "replace"), 0
        if phase != b"X":
            if name not in self.names:
                self.names.append(name)
            kind = 256 * self.names.index(name) + BEGIN if phase == b"B" else 0
        elif re.fullmatch("[0-9]{1,5}", name):
            self.ranks.add(int(name))
            kind = 256 * int(name) + TICK
        self._kinds[phase, text] = kind
        return kind


def _check_start(path: Path) -> None:
    """Raise UserError if the file cannot be read or does not start like a timeline."""
    try:
        with open_regular(path) as file:
            start = file.read(LONGEST_EVENT).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None
    if not start.strip(b"[]\n\r \0"):
        raise UserError(
            f"{path} has no events. Horovod writes them when tensors are sent: the run may have ended before."
        )
    if not start.lstrip().startswith(b"[") or not (_START in start or b'"process_name"' in start):
        raise UserError(
            f"{path} is not a Horovod timeline. Record one with HOROVOD_TIMELINE=FILE (docs/guides/profiling.md)."
        )


@lru_cache(4096)
def _tensor_bytes(dtype: bytes, shape: bytes) -> int:
    """Bytes of a tensor; NONE if unknown."""
    item = ITEM_BYTES.get(dtype.decode())
    parts = [part.strip() for part in shape.split(b",") if part.strip()]
    if item is None or not all(part.isdigit() and len(part) < 16 for part in parts):
        return NONE
    size = item * math.prod(map(int, parts))
    return size if size < LARGEST else NONE
