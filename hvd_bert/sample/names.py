"""Composed names, some of which are reserved for dev."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_bert.sample import themes
from hvd_bert.sample.vocabulary import split_word, vocabulary


def _reserved_for_dev(first: int, second: int) -> bool:
    # A fifth of the pairs. Every first and every second part occurs in both splits.
    return (first + second) % 5 == 0


def _pairs(firsts: Sequence[str], seconds: Sequence[str], dev: bool) -> list[tuple[str, str]]:
    return [
        (first, second)
        for i, first in enumerate(firsts)
        for j, second in enumerate(seconds)
        if _reserved_for_dev(i, j) == dev
    ]


def _composed(starts: Sequence[str], ends: Sequence[str], dev: bool) -> dict[str, str]:
    """Name -> its first part."""
    # WordPiece would split "bar" + "berg" into "barber" + "g": keep only names that it splits where they were joined.
    pieces = frozenset(vocabulary())
    return {
        (start + end).capitalize(): start
        for start, end in _pairs(starts, ends, dev)
        if split_word(start + end, pieces) == [start, f"##{end}"]
    }


@dataclass(frozen=True)
class Names:
    """The names that one split may use."""

    places: tuple[str, ...]
    surnames: tuple[str, ...]
    ships: tuple[str, ...]
    first_part: dict[str, str] = field(repr=False)  # name -> its first part

    @classmethod
    def of(cls, split: str) -> Names:
        """The names of "train" or "dev"; the two have none in common."""
        dev = split == "dev"
        places = _composed(themes.PLACE_STARTS, themes.PLACE_ENDS, dev)
        surnames = _composed(themes.SURNAME_STARTS, themes.SURNAME_ENDS, dev)
        ships = {f"{first} {second}": first for first, second in _pairs(themes.SHIP_FIRST, themes.SHIP_SECOND, dev)}
        return cls(tuple(places), tuple(surnames), tuple(ships), places | surnames | ships)
