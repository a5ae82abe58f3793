"""Read a timeline of Horovod 0.28 into arrays of events, one block of the file at a time.

The format, from horovod/common/timeline.cc: a JSON array, which rank 0 writes for all ranks. A tensor is a "process":
two lines of metadata name its `pid`. Other events follow without line breaks, so most of a file is one line:

    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5780290, "pid": 47},{"ph": "X", "name": "1", "ts": ...}

`ts` is in microseconds. `B` and `E` begin and end a span; `E` has no name. The last `E` of an operation has the
tensor's dtype and shape. `X` means that rank 1 has become ready. `i` is the start of a cycle. After every event the
file ends with "]", which the next event overwrites. The file of a killed job may lack it and end within an event.

NumPy parses all events of a block at once.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hvd_bert.errors import UserError
from hvd_bert.monitoring.timeline_rows import Array, Table, grown
from hvd_bert.storage.reading import open_regular

BEGIN, END, TICK, MARK = ord("B"), ord("E"), ord("X"), ord("i")
# Masks, by number of digits, of a number at the end of 16 bytes.
_DIGITS = np.stack([np.frombuffer(b"\0" * (16 - count) + b"\x0f" * count, "<u8") for count in range(17)])


@dataclass
class Names:
    """The names behind the numbers. Grows while a file is read."""

    spans: list[str] = field(default_factory=list)
    tensors: dict[int, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


def word(text: bytes) -> Any:
    """8 bytes as one number."""
    return np.frombuffer(text, "<u8")[0]


def words(data: bytes, at: Array, count: int) -> Array:
    """(n, count) words, starting at each position."""
    width = 8 * count
    everywhere: Array = np.ndarray((len(data) - width + 1,), f"V{width}", data, 0, (1,))
    return everywhere[at].view("<u8").reshape(-1, count)


def numbers(data: bytes, at: Array) -> tuple[Array, Array]:
    """The decimal number at each position, and its end: the position itself without one of up to 15 digits."""
    others = (words(data, at, 2).view(np.uint8).reshape(len(at), 16) - np.uint8(ord("0"))) > 9
    digits = others.argmax(axis=1)
    masked = words(data, at + digits - 16, 2) & _DIGITS[digits]
    low = _parsed(masked[:, 1])
    if digits.max(initial=0) > 8:
        low += _parsed(masked[:, 0]) * np.uint64(10**8)
    return low.astype(np.int64), at + digits


def _parsed(digits: Array) -> Array:
    """Numbers of 8 decimal digits, from words with one digit per byte, the highest first."""
    pairs = (digits * np.uint64(10) + (digits >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs * np.uint64(100) + (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    eights: Array = (fours * np.uint64(10000) + (fours >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return eights


class SpanNames:
    """Looks up the numbers of names by the 16 bytes before the end of a name."""

    FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd, to mix two words into a key

    def __init__(self, names: Names) -> None:
        self.names = names
        self.keys = np.zeros(1, np.uint64)  # sorted; with their phases and codes
        self.values = np.zeros((1, 2), np.int32)

    def look_up(self, words: Array, data: bytes, ends: Array) -> tuple[Array, Array]:
        """Phase and code of the names that end at `ends`; phase 0 if a name is not Horovod's."""
        keys = words[:, 0] * self.FACTORS[0] + words[:, 1] * self.FACTORS[1]
        place = self._places(keys)
        unknown = np.flatnonzero(self.keys[place] != keys)
        if len(unknown):
            _, first = np.unique(keys[unknown], return_index=True)
            new = np.sort(unknown[first])  # numbered in the order of the file
            described = np.array([self._describe(data, end) for end in ends[new].tolist()], np.int32)
            all_keys = np.concatenate((self.keys, keys[new]))
            order = np.argsort(all_keys)
            self.keys, self.values = all_keys[order], np.concatenate((self.values, described))[order]
            place = self._places(keys)
        phase, code = self.values[place].T
        return phase, code

    def _places(self, keys: Array) -> Array:
        return np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)

    def _describe(self, data: bytes, end: int) -> tuple[int, int]:
        key = b'", "name": "'
        start = data.rfind(key, max(0, end - 200), end)
        name = data[start + len(key) : end].decode("utf-8", "replace")
        phase = data[start - 1] if start > 0 else 0
        if phase == TICK and re.fullmatch("[0-9]{1,7}", name):
            self.names.ranks.add(int(name))
            return TICK, int(name)
        if phase not in (BEGIN, MARK):
            return 0, 0
        if name not in self.names.spans:
            self.names.spans.append(name)
        return phase, self.names.spans.index(name)


BLOCK = 2 << 20  # bytes: its arrays fit into a core's cache
LONGEST_EVENT = 1 << 20  # bytes; nothing longer is an event
LONGEST_METADATA = 4096  # bytes of a tensor's two lines
LARGEST = 2**50  # bytes of a tensor
MAX_PID = 10**7 - 1
CYCLE = "CYCLE_START"
_PAD = b"\0" * 96  # so that reads before the first and after the last event stay inside
_EVENT = b'{"ph": "'
_TENSOR = b'{"name": "process_name"'
_METADATA = re.compile(rb', "ph": "M", "pid": (\d{1,7}), "args": \{"name": "(.*?)"\}\}', re.DOTALL)
_SHAPE = re.compile(rb', "args": \{"dtype": "(\w+)", "shape": "\[([\d, ]*)\]"')
ITEM_BYTES = {"uint8": 1, "int8": 1, "bool": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2} | {
    **{"int32": 4, "float32": 4, "uint32": 4, "int64": 8, "uint64": 8, "float64": 8}
}


@dataclass
class Events(Table):
    """A row per event, in the file's order.

    `phase`: BEGIN, END or TICK. `code`: the number in `Names.spans` of a BEGIN, the rank of a TICK. `ts`: microseconds.
    `pid`: the tensor. `size`: the tensor's bytes at the END of an operation, else -1.
    """

    phase: Array
    code: Array
    ts: Array
    pid: Array
    size: Array


_TS, _TS_MASK = word(b'"ts": \0\0'), word(b"\xff" * 6 + b"\0\0")
_IS_END = word(b'"ph": "E')
_PID = word(b', "pid":')


class Reader:
    """Reads the file at `path`. `names` is complete after the last of `blocks`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = Names()
        self.events = 0
        self.first_ts: int | None = None
        self.last_ts = 0
        self.cut_short = False  # no "]" at the end
        self._spans = SpanNames(self.names)
        self._named = np.zeros(1024, bool)  # by pid

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
        if not start.lstrip().startswith(b"[") or not (_EVENT in start or b'"process_name"' in start):
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
                data = b"".join((_PAD, rest, chunk, _PAD))
                end = _last_event(data)
                if end > 0:
                    yield self._events(data[:end] + _PAD)
                rest = data[max(end, len(_PAD)) : -len(_PAD)][-LONGEST_EVENT:]
        self.cut_short = not rest.rstrip(b"\n\r \0").endswith(b"}]")
        yield self._events(b"".join((_PAD, rest, _PAD)))

    def _events(self, data: bytes) -> Events:
        """The events of a block with padding at both ends. An incomplete event is left out."""
        raw = np.frombuffer(data, np.uint8)
        at = np.flatnonzero(raw == ord("s"))  # of "ts": once per event, rarely elsewhere
        at = at[(words(data, at - 2, 1)[:, 0] & _TS_MASK) == _TS]
        phase, code = self._phases(data, at - 5)
        ts, ends = numbers(data, at + 4)
        timed = ends > at + 4
        pid, pid_ends = numbers(data, ends + 9)
        after = raw[pid_ends]
        has_pid = (words(data, ends, 1)[:, 0] == _PID) & (pid_ends > ends + 9) & (pid <= MAX_PID)
        has_pid &= (after == ord("}")) | (after == ord(","))
        self._cover(ts[timed])
        whole = np.flatnonzero(has_pid & timed & (phase != 0) & (phase != MARK))
        events = Events(
            phase[whole].astype(np.uint8), code[whole], ts[whole], pid[whole].astype(np.int32),
            np.full(len(whole), -1, np.int64),
        )  # fmt: skip
        self._name_tensors(data, events.pid)
        sized = np.flatnonzero((events.phase == END) & (after[whole] == ord(",")))
        events.size[sized] = _sizes(data, events.pid[sized], pid_ends[whole[sized]])
        self.events += len(events)
        return events

    def _phases(self, data: bytes, ends: Array) -> tuple[Array, Array]:
        """Phase and code of events by the bytes before the quotes at `ends`: END, or those of the event's name."""
        phase = np.full(len(ends), END, np.int32)
        code = np.zeros(len(ends), np.int32)
        named = np.flatnonzero(words(data, ends - 8, 1)[:, 0] != _IS_END)
        phase[named], code[named] = self._spans.look_up(words(data, ends[named] - 16, 2), data, ends[named])
        return phase, code

    def _cover(self, times: Array) -> None:
        """Update the time that the file covers."""
        if not len(times):
            return
        first = int(times.min())
        self.first_ts = first if self.first_ts is None else min(self.first_ts, first)
        self.last_ts = max(self.last_ts, int(times.max()))

    def _name_tensors(self, data: bytes, pid: Array) -> None:
        if not len(pid):
            return
        self._named = grown(self._named, int(pid.max()) + 1)
        if self._named[pid].all():
            return
        for start in data.split(b'"process_name"')[1:]:  # parts, since a search for a missing end must not go on
            if match := _METADATA.match(start[:LONGEST_METADATA]):
                self.names.tensors[int(match[1])] = match[2].decode("utf-8", "replace")
        self._named[pid] = True


def _last_event(data: bytes) -> int:
    """The start of the last event, with the metadata before it; -1 if there is none."""
    end = data.rfind(_EVENT)
    before = data.rfind(_TENSOR, max(0, end - LONGEST_METADATA), end) if end > 0 else -1
    return before if before > 0 and data.find(_EVENT, before, end) < 0 else end


def _sizes(data: bytes, pid: Array, at: Array) -> Array:
    """Bytes of the tensors, from the dtype and shape of each one's first event in the block; -1 if unknown."""
    _, first, which = np.unique(pid, return_index=True, return_inverse=True)
    ends = [data.find(b"}", place, place + LONGEST_METADATA) for place in at[first].tolist()]
    sizes = [_bytes_of(data[place:end]) if end > 0 else -1 for place, end in zip(at[first].tolist(), ends, strict=True)]
    return np.array(sizes, np.int64)[which]


@lru_cache(4096)
def _bytes_of(arguments: bytes) -> int:
    """Bytes of a tensor, from its dtype and shape; -1 if unknown."""
    match = _SHAPE.match(arguments)
    item = ITEM_BYTES.get(match[1].decode()) if match else None
    if match is None or item is None:
        return -1
    parts = [part.strip() for part in match[2].split(b",") if part.strip()]
    if not all(part.isdigit() and len(part) < 16 for part in parts):
        return -1
    size = item * math.prod(map(int, parts))
    return size if size < LARGEST else -1
