"""Random choices that are the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Random choices that use only `Random.random()`."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def chance(self, p: float) -> bool:
        return self._random.random() < p

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def choose(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """k different items in random order, or all if there are fewer."""
        left = list(items)
        out: list[T] = []
        while left and len(out) < k:
            out.append(left.pop(self.below(len(left))))
        return out
