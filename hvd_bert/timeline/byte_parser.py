"""Parse numbers and names in the bytes of a timeline, many at once, as words of 8 bytes."""

from __future__ import annotations

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

    BITS = 12
    SHIFT = np.uint64(64 - BITS)

    def __init__(self, names: Names) -> None:
        self.names = names
        self.known: list[tuple[int, int, int, int]] = []  # two words, phase, code
        self._choose()

    def _choose(self) -> None:
        """Choose multipliers that give each known name its own slot."""
        seed = 0
        while True:
            seed += 1
            random = np.random.default_rng(seed)
            self.factors = random.integers(0, 1 << 63, 2, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
            self.mixed = np.zeros(1 << self.BITS, np.uint64)
            self.phase, self.code = np.zeros((2, 1 << self.BITS), np.int32)  # phase 0: not Horovod's
            slots = set()
            for first, second, phase, code in self.known:
                mixed = self._mix(np.array([[first, second]], np.uint64))
                (slot,) = (mixed >> self.SHIFT).tolist()
                slots.add(slot)
                self.mixed[slot], self.phase[slot], self.code[slot] = mixed[0], phase, code
            if len(slots) == len(self.known):
                return

    def _mix(self, words: Array) -> Array:
        mixed: Array = words[:, 0] * self.factors[0] + words[:, 1] * self.factors[1]
        return mixed

    def look_up(self, words: Array, data: bytes, ends: Array) -> tuple[Array, Array]:
        """Phase and code of the names that end at `ends`; phase 0 if a name is not Horovod's."""
        while True:
            mixed = self._mix(words)
            slots = mixed >> self.SHIFT
            unknown = np.flatnonzero(self.mixed[slots] != mixed)
            if not len(unknown):
                return self.phase[slots], self.code[slots]
            at = int(unknown[0])
            if len(self.known) >= 1 << (self.BITS - 2):
                raise UserError("The file has more kinds of events than Horovod writes. It is not a Horovod timeline.")
            self.known.append((int(words[at, 0]), int(words[at, 1]), *self._describe(data, int(ends[at]))))
            self._choose()

    def _describe(self, data: bytes, end: int) -> tuple[int, int]:
        key = b'", "name": "'
        start = data.rfind(key, max(0, end - 200), end)
        name = data[start + len(key) : end].decode("utf-8", "replace")
        phase = data[start - 1] if start > 0 else 0
        if phase == TICK and name.isdigit():
            self.names.ranks.add(int(name))
            return TICK, int(name)
        if phase in (BEGIN, MARK):
            if name not in self.names.spans:
                self.names.spans.append(name)
            return phase, self.names.spans.index(name)
        return 0, 0
