"""Read a timeline of Horovod 0.28 into arrays of events, one block of the file at a time.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from hvd_bert.errors import UserError
from hvd_bert.storage.reading import open_regular
from hvd_bert.tools.timeline.rows import NONE, Array, Table

BEGIN, END, TICK = ord("B"), ord("E"), ord("X")
BLOCK = 2 << 20  # bytes
LONGEST_EVENT = 1 << 20  # bytes; nothing longer is an event
LONGEST_METADATA = 4096  # bytes of a tensor's two lines
LARGEST = 2**50  # bytes of a tensor
CYCLE = "CYCLE_START"
_START = b'{"ph": "'
_TENSOR = b'{"name": "process_name"'
_METADATA = re.compile(_TENSOR + rb', "ph": "M", "pid": (\d{1,7}), "args": \{"name": "([^"]*)"\}\}')
_EVENT = re.compile(
    rb'"ph": "(?:E|([BXi])", "name": "([^"]{0,200}))", "ts": (\d{1,15})(?=[,}])'
    rb'(?:, "pid": (\d{1,7})(?:\}|,(?: "args": \{"dtype": "(\w+)", "shape": "\[([\d, ]*)\]")?))?'
)
ITEM_BYTES = {"uint8": 1, "int8": 1, "bool": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2} | {
    **{"int32": 4, "float32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float64": 8}
}


@dataclass
class Names:
    """The names behind the numbers. Grows while a file is read."""

    spans: list[str] = field(default_factory=list)
    tensors: dict[int, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


@dataclass
class Events(Table):
    """A row per event, in the file's order.

    `phase`: BEGIN, END or TICK. `code`: the number in `Names.spans` of a BEGIN, the rank of a TICK. `ts`: microseconds.
    `pid`: the tensor. `size`: the tensor's bytes at the END of an operation, else NONE.
    """

    phase: Array
    code: Array
    ts: Array
    pid: Array
    size: Array


class Reader:
    """Reads the file at `path`. `names` is complete after the last of `blocks`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = Names()
        self.events = 0
        self.first_ts: int | None = None
        self.last_ts = 0
        self.cut_short = False  # no "]" at the end
        self._kinds: dict[tuple[bytes, bytes], int] = {(b"", b""): END}

    def check_start(self) -> None:
        """Raise UserError if the file cannot be read or does not start like a timeline."""
        try:
            with open_regular(self.path) as file:
                start = file.read(LONGEST_EVENT).removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}.") from None
        if not start.strip(b"[]\n\r \0"):
            raise UserError(
                f"{self.path} has no events. Horovod writes them when tensors are sent: the run may have ended before."
            )
        if not start.lstrip().startswith(b"[") or not (_START in start or b'"process_name"' in start):
            raise UserError(
                f"{self.path} is not a Horovod timeline. Record one with HOROVOD_TIMELINE=FILE"
                " (docs/guides/profiling.md)."
            )

    def blocks(self, progress: Callable[[int], object] = lambda count: None) -> Iterator[Events]:
        """The events. `progress` is called with the number of bytes read. Raises UserError."""
        self.check_start()
        rest = b""
        with self.path.open("rb", buffering=0) as file:
            while chunk := file.read(BLOCK):
                progress(len(chunk))
                data = rest + chunk
                end = max(_last_event(data), 0)
                yield self._events(data[:end])
                rest = data[end:][-LONGEST_EVENT:]
        self.cut_short = not rest.rstrip(b"\n\r \0").endswith(b"}]")
        yield self._events(rest)

    def _events(self, data: bytes) -> Events:
        """The events of a block. An incomplete event is left out."""
        for pid, name in _METADATA.findall(data):
            self.names.tensors[int(pid)] = name.decode("utf-8", "replace")
        found = _EVENT.findall(data)
        if not found:
            return Events.empty()
        phases, names, times, pids, types, shapes = zip(*found, strict=True)
        kinds = [self._kinds.get(key) or self._kind(*key) for key in zip(phases, names, strict=True)]
        code, phase = np.divmod(np.array(kinds), 256)
        ts = np.array(list(map(int, times)))
        self.first_ts = int(min(ts.min(), ts[0] if self.first_ts is None else self.first_ts))
        self.last_ts = max(self.last_ts, int(ts.max()))
        pid = np.array([int(text) if text else NONE for text in pids], np.int32)
        size = np.array([_bytes_of(*kind) if kind[0] else NONE for kind in zip(types, shapes, strict=True)], np.int64)
        events = Events(phase.astype(np.uint8), code, ts, pid, size).only(np.flatnonzero((phase != 0) & (pid != NONE)))
        self.events += len(events)
        return events

    def _kind(self, phase: bytes, text: bytes) -> int:
        """256 times the code plus the phase of the events of a name; 0 for events that are in no row."""
        name, kind = text.decode("utf-8", "replace"), 0
        if phase != b"X":
            if name not in self.names.spans:
                self.names.spans.append(name)
            kind = 256 * self.names.spans.index(name) + BEGIN if phase == b"B" else 0
        elif re.fullmatch("[0-9]{1,7}", name):
            self.names.ranks.add(int(name))
            kind = 256 * int(name) + TICK
        self._kinds[phase, text] = kind
        return kind


def _last_event(data: bytes) -> int:
    """The start of the last event, with the metadata before it; -1 if there is none."""
    end = data.rfind(_START)
    before = data.rfind(_TENSOR, max(0, end - LONGEST_METADATA), end) if end > 0 else -1
    return before if before > 0 and data.find(_START, before, end) < 0 else end


@lru_cache(4096)
def _bytes_of(dtype: bytes, shape: bytes) -> int:
    """Bytes of a tensor; NONE if unknown."""
    item = ITEM_BYTES.get(dtype.decode())
    parts = [part.strip() for part in shape.split(b",") if part.strip()]
    if item is None or not all(part.isdigit() and len(part) < 16 for part in parts):
        return NONE
    size = item * math.prod(map(int, parts))
    return size if size < LARGEST else NONE
