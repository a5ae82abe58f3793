"""Read a timeline of Horovod 0.28, event by event.

The format, from horovod/common/timeline.cc: a JSON array, which rank 0 writes for all ranks. A tensor is a "process":
two lines of metadata give the tensor's `pid`. Other events follow without line breaks, so most of a file is one line:

    {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": 5780290, "pid": 47},{"ph": "X", "name": "1", "ts": ...}

`ts` is in microseconds. `B` and `E` begin and end a span; `E` has no name. The last `E` of an operation has the
tensor's dtype and shape. `X` means that a rank, here rank 1, has become ready. `i` is the start of a Horovod cycle.
After every event the file ends with "]", which the next event overwrites. The file of a killed job may lack the "]" and
end within an event.
"""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hvd_bert.errors import UserError
from hvd_bert.storage.reading import GIB, MIB, open_regular

Event = tuple[str, str, int, int, int]  # phase, name of a BEGIN or rank of a TICK, microseconds, pid, bytes
NONE = -1  # missing or unknown
BEGIN, END, TICK = "B", "E", "X"
BLOCK = 2 * MIB  # bytes that are parsed at a time
MAX_BYTES = GIB  # maximum bytes that are read of a file: the analysis needs up to three times as much memory
LONGEST_EVENT = MIB  # maximum bytes of an event
LARGEST = 2**50  # maximum bytes of a tensor
_START = b'{"ph": "'
_EVENT = re.compile(
    r'"ph": "(?:E|([BXi])", "name": "([^"]{0,200}))", "ts": (\d{1,15})(?=[,}])'
    r'(?:, "pid": (\d{1,7})(?:\}|,(?: "args": \{"dtype": "(\w+)", "shape": "\[([\d, ]{0,200})\]")?))?',
    re.ASCII,
)
ITEM_BYTES = dict.fromkeys(("uint8", "int8", "bool"), 1) | dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2)
ITEM_BYTES |= dict.fromkeys(("int32", "float32", "uint32"), 4) | dict.fromkeys(("int64", "uint64", "float64"), 8)


@dataclass
class Timeline:
    """A timeline file. All attributes except `path` are filled while `events` reads the file.

    `names`: names of the spans. `ranks`: ranks named in TICK events. `count`: number of tensor events. `first_us`,
    `last_us`: times of the first and the last event. `cut_short`: whether the "]" after the last event is missing.
    """

    path: Path
    names: dict[str, None] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    count: int = 0
    first_us: int = 10**15
    last_us: int = 0
    cut_short: bool = False

    def events(self) -> Iterator[Event]:
        """Read the complete tensor events, in the file's order. Raises UserError."""
        _check_start(self.path)
        for phase, name, time, pid, dtype, shape in self._matches():
            ts = int(time)
            self.first_us, self.last_us = min(self.first_us, ts), max(self.last_us, ts)
            if phase == BEGIN:
                self.names[name] = None
            elif phase == TICK and name.isdecimal() and len(name) < 6:
                self.ranks.add(int(name))
            elif phase:  # the start of a cycle
                continue
            if pid:
                self.count += 1
                yield phase or END, name, ts, int(pid), _tensor_bytes(dtype, shape) if dtype else NONE

    def _matches(self) -> Iterator[tuple[str, ...]]:
        """Find _EVENT in the first MAX_BYTES, with a progress bar on a terminal. Yields the groups of each match."""
        size, rest = min(self.path.stat().st_size, MAX_BYTES), b""
        bar: dict[str, Any] = {"disable": None, "leave": False, "desc": self.path.name}
        with open_regular(self.path) as opened, tqdm.wrapattr(opened, "read", size, **bar) as file:
            for chunk in islice(iter(partial(file.read, BLOCK), b""), MAX_BYTES // BLOCK):
                data = rest + chunk
                end = max(data.rfind(_START), 0)
                yield from _EVENT.findall(data[:end].decode("utf-8", "replace"))
                rest = data[end:][-LONGEST_EVENT:]
        yield from _EVENT.findall(rest.decode("utf-8", "replace"))
        self.cut_short = not rest.rstrip(b"\n\r \0").endswith(b"}]")


def _check_start(path: Path) -> None:
    """Raise UserError if the file cannot be read, or if its first bytes show that it is not a timeline."""
    try:
        with open_regular(path) as file:
            start = file.read(LONGEST_EVENT).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None
    if not start.strip(b"[]\n\r \0"):
        raise UserError(
            f"{path} has no events. Horovod writes them when tensors are sent: the run may have ended before that."
        )
    if not start.lstrip().startswith(b"[") or not (_START in start or b'"process_name"' in start):
        raise UserError(
            f"{path} is not a Horovod timeline. Record one with HOROVOD_TIMELINE=FILE (docs/guides/profiling.md)."
        )


@lru_cache(4096)
def _tensor_bytes(dtype: str, shape: str) -> int:
    """Compute the bytes of a tensor; NONE if the dtype is unknown or the size is not plausible."""
    if dtype not in ITEM_BYTES:
        return NONE
    size = ITEM_BYTES[dtype] * math.prod(map(int, re.findall("[0-9]+", shape)))
    return size if size < LARGEST else NONE
