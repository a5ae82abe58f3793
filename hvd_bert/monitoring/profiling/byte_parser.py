"""Parse numbers and names in the bytes of a timeline, many at once, as words of 8 bytes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.errors import UserError

Array = NDArray[Any]
BEGIN, END, TICK, MARK = ord("B"), ord("E"), ord("X"), ord("i")


@dataclass
class Names:
    """The names behind the numbers. Grows while a file is read."""

    spans: list[str] = field(default_factory=list)
    tensors: dict[int, str] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)


def word(text: bytes) -> Any:
    """8 bytes as one number."""
    return np.frombuffer(text, "<u8")[0]


# Masks, by number of digits, of a number at the end of 16 or 8 bytes.
_DIGITS_16 = np.stack([np.frombuffer(b"\0" * (16 - count) + b"\x0f" * count, "<u8") for count in range(17)])
_DIGITS_8 = np.array([word(b"\0" * (8 - count) + b"\x0f" * count) for count in range(9)])


def words(data: bytes, at: Array, count: int) -> Array:
    """(n, count) words, starting at each position."""
    width = 8 * count
    everywhere: Array = np.ndarray((len(data) - width + 1,), f"V{width}", data, 0, (1,))
    return everywhere[at].view("<u8").reshape(-1, count)


def digit_counts(data: bytes, at: Array, maximum: int) -> Array:
    """Number of decimal digits at each position if below `maximum` (8 or 16), else 0."""
    others = (words(data, at, maximum // 8).view(np.uint8).reshape(len(at), maximum) - np.uint8(ord("0"))) > 9
    counts: Array = others.argmax(axis=1)
    return counts


def numbers(data: bytes, ends: Array, digits: Array, maximum: int) -> Array:
    """The numbers with `digits` digits that end before the positions `ends`. `maximum` of digits: 8 or 16."""
    if maximum == 8:
        return _parsed(words(data, ends - 8, 1)[:, 0] & _DIGITS_8[digits])
    masked = words(data, ends - 16, 2) & _DIGITS_16[digits]
    low = _parsed(masked[:, 1])
    return low + _parsed(masked[:, 0]) * np.uint64(10**8) if digits.max(initial=0) > 8 else low


def _parsed(digits: Array) -> Array:
    """Numbers of 8 decimal digits, from words with one digit per byte, the highest first."""
    pairs = (digits * np.uint64(10) + (digits >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    fours = (pairs * np.uint64(100) + (pairs >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    eights: Array = (fours * np.uint64(10000) + (fours >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return eights


class SpanNames:
    """Looks up the numbers of names by the 16 bytes before the end of a name."""

    MIN_BITS = 12
    MAX_NAMES = 1 << 12  # kinds of spans, and ranks
    MAX_RANK = 10**6
    TRIES = 4  # with a table of one size

    def __init__(self, names: Names) -> None:
        self.names = names
        self.words = np.zeros((0, 2), np.uint64)
        self.values = np.zeros((0, 2), np.int32)  # phase and code of each name
        self._codes: dict[str, int] = {}
        self._arrange()

    def _arrange(self) -> None:
        """Choose multipliers that give each known name its own slot, in a larger table if the first ones do not."""
        for attempt in itertools.count():
            random = np.random.default_rng(attempt + 1)
            self.factors = random.integers(0, 1 << 63, 2, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
            bits = self.MIN_BITS + attempt // self.TRIES
            self.shift = np.uint64(64 - bits)
            mixed = self._mix(self.words)
            slots = mixed >> self.shift
            if len(np.unique(slots)) == len(slots):
                break
        self.mixed = np.zeros(1 << bits, np.uint64)
        self.phase, self.code = np.zeros((2, 1 << bits), np.int32)  # phase 0: not Horovod's
        self.mixed[slots] = mixed
        self.phase[slots], self.code[slots] = self.values.T

    def _mix(self, words: Array) -> Array:
        mixed: Array = words[:, 0] * self.factors[0] + words[:, 1] * self.factors[1]
        return mixed

    def look_up(self, words: Array, data: bytes, ends: Array) -> tuple[Array, Array]:
        """Phase and code of the names that end at `ends`; phase 0 if a name is not Horovod's. Raises UserError."""
        while True:
            mixed = self._mix(words)
            slots = mixed >> self.shift
            unknown = np.flatnonzero(self.mixed[slots] != mixed)
            if not len(unknown):
                return self.phase[slots], self.code[slots]
            _, first = np.unique(mixed[unknown], return_index=True)
            new = np.sort(unknown[first])  # numbered in the order of the file
            if len(self.words) + len(new) > self.MAX_NAMES:
                raise UserError("The file has more kinds of events than Horovod writes. It is not a Horovod timeline.")
            self.words = np.concatenate((self.words, words[new]))
            described = [self._describe(data, end) for end in ends[new].tolist()]
            self.values = np.concatenate((self.values, np.array(described, np.int32)))
            self._arrange()

    def _describe(self, data: bytes, end: int) -> tuple[int, int]:
        key = b'", "name": "'
        start = data.rfind(key, max(0, end - 200), end)
        name = data[start + len(key) : end].decode("utf-8", "replace")
        phase = data[start - 1] if start > 0 else 0
        if phase == TICK and name.isascii() and name.isdigit():
            if len(name) > 7 or int(name) > self.MAX_RANK:
                raise UserError(f"The file names rank {name[:20]}, which cannot be. It is not a Horovod timeline.")
            self.names.ranks.add(int(name))
            return TICK, int(name)
        if phase in (BEGIN, MARK):
            if name not in self._codes:
                self._codes[name] = len(self.names.spans)
                self.names.spans.append(name)
            return phase, self._codes[name]
        return 0, 0
