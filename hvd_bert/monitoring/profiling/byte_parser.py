"""Parse numbers and names in the bytes of a timeline, many at once, as words of 8 bytes.

orjson takes more than 4 times as long for the whole analysis of a timeline, as it makes an object of each event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_bert.errors import UserError

Array = NDArray[Any]
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

    MAX_NAMES = 1 << 12  # kinds of spans, and ranks
    MAX_RANK = 10**6
    FACTORS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd, to mix two words into a key

    def __init__(self, names: Names) -> None:
        self.names = names
        self.keys = np.zeros(1, np.uint64)  # sorted; with their phases and codes
        self.values = np.zeros((1, 2), np.int32)

    def look_up(self, words: Array, data: bytes, ends: Array) -> tuple[Array, Array]:
        """Phase and code of the names that end at `ends`; phase 0 if a name is not Horovod's. Raises UserError."""
        keys = words[:, 0] * self.FACTORS[0] + words[:, 1] * self.FACTORS[1]
        place = self._places(keys)
        unknown = np.flatnonzero(self.keys[place] != keys)
        if len(unknown):
            _, first = np.unique(keys[unknown], return_index=True)
            new = np.sort(unknown[first])  # numbered in the order of the file
            if len(self.keys) + len(new) > self.MAX_NAMES:
                raise UserError("The file has more kinds of events than Horovod writes. It is not a Horovod timeline.")
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
        if phase == TICK and name.isascii() and name.isdigit():
            if len(name) > 7 or int(name) > self.MAX_RANK:
                raise UserError(f"The file names rank {name[:20]}, which cannot be. It is not a Horovod timeline.")
            self.names.ranks.add(int(name))
            return TICK, int(name)
        if phase not in (BEGIN, MARK):
            return 0, 0
        if name not in self.names.spans:
            self.names.spans.append(name)
        return phase, self.names.spans.index(name)
