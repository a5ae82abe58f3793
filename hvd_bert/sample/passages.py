"""Passages about an invented world (themes.yaml): a thing, facts about it, and the position of each value in the text.

The vocabulary has whole words, composed names in two pieces, and letters for any other text.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import TypeVar

from hvd_bert.storage.reading import convert, read_yaml

T = TypeVar("T")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Non-ASCII characters of English text, which would otherwise become [UNK].
EXTRA_CHARACTERS = "–—‘’“”…£€°ßæøœ"  # noqa: RUF001
_WORD = re.compile(r"[a-z]+|[^a-z\s]")
# Marks a value in an unfinished passage: number of the fact, value, end.
_MARK = re.compile("\x01(\\d+)\x02([^\x03]*)\x03")


@dataclass(frozen=True)
class Relation:
    """One kind of fact: how a passage states it, and how a question asks for it."""

    predicates: list[str]
    questions: list[str]


@dataclass(frozen=True)
class Themes:
    """The content of themes.yaml."""

    place_starts: list[str]
    place_ends: list[str]
    surname_starts: list[str]
    surname_ends: list[str]
    women: list[str]
    men: list[str]
    ship_first: list[str]
    ship_second: list[str]
    treasures: list[str]
    heirlooms: list[str]
    asides: list[str]
    titles: dict[str, list[str]]
    relations: dict[str, list[Relation]]


THEMES = convert(read_yaml(Path(__file__).with_name("themes.yaml")), Themes)


class Dice:
    """Random choices that are the same on every machine: they use only `Random.random()`."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def chance(self, p: float) -> bool:
        return self._random.random() < p

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def choose(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]


@cache
def vocabulary() -> list[str]:
    """All word pieces in the order of their ids."""
    characters = [*string.ascii_lowercase, *string.digits, *string.punctuation, *EXTRA_CHARACTERS]
    pairs = [f"{n:02d}" for n in range(100)]
    pieces = [*SPECIAL, *characters, *(f"##{c}" for c in characters), *pairs, *(f"##{p}" for p in pairs)]
    pieces += [*THEMES.place_starts, *(f"##{end}" for end in THEMES.place_ends)]
    pieces += [*THEMES.surname_starts, *(f"##{end}" for end in THEMES.surname_ends)]
    pieces += sorted(_plain_words())
    return list(dict.fromkeys(pieces))


def _plain_words() -> set[str]:
    """Every word of the themes except the parts of composed names, in lower case."""
    text = [*THEMES.women, *THEMES.men, *THEMES.ship_first, *THEMES.ship_second, *THEMES.treasures, *THEMES.heirlooms]
    text += [*THEMES.asides, "the", "it", "and"]
    for titles in THEMES.titles.values():
        text += titles
    for relations in THEMES.relations.values():
        for relation in relations:
            text += [*relation.predicates, *relation.questions]
    return {word for line in text for word in _WORD.findall(re.sub(r"\{.\}", " ", line.lower()))}


def _split(word: str) -> list[str]:
    """Split a word by WordPiece's rule, longest piece first."""
    pieces = vocabulary()
    out: list[str] = []
    while word:
        start = "##" if out else ""
        end = next(end for end in range(len(word), 0, -1) if start + word[:end] in pieces)
        out.append(start + word[:end])
        word = word[end:]
    return out


class Names:
    """The names that "train" or "dev" may use; the two have none in common. `first_part`: of each name."""

    def __init__(self, split: str) -> None:
        places, surnames = (
            {
                (start + end).capitalize(): start
                for start, end in _pairs(starts, ends, split)
                # WordPiece would split "bar" + "berg" into "barber" + "g": keep only names that it splits as joined.
                if _split(start + end) == [start, f"##{end}"]
            }
            for starts, ends in (
                (THEMES.place_starts, THEMES.place_ends),
                (THEMES.surname_starts, THEMES.surname_ends),
            )
        )
        ships = {f"{one} {two}": one for one, two in _pairs(THEMES.ship_first, THEMES.ship_second, split)}
        self.places, self.surnames, self.ships = [*places], [*surnames], [*ships]
        self.first_part = places | surnames | ships


def _pairs(firsts: Sequence[str], seconds: Sequence[str], split: str) -> Iterator[tuple[str, str]]:
    for (i, first), (j, second) in product(enumerate(firsts), enumerate(seconds)):
        # A fifth of the pairs is reserved for dev. Every first and every second part occurs in both splits.
        if ((i + j) % 5 == 0) == (split == "dev"):
            yield first, second


@dataclass(frozen=True)
class Fact:
    relation: Relation
    value: str


@dataclass(frozen=True)
class Passage:
    """`starts[i]`: position of the value of `facts[i]` in `context`. `untold`: facts that the passage leaves out."""

    context: str
    entity: str
    facts: list[Fact]
    starts: list[int]
    untold: list[Relation]


class Values:
    """Draws names and values for one passage: none twice, and no two names with the same first part."""

    def __init__(self, dice: Dice, names: Names) -> None:
        self._dice = dice
        self._names = names
        self._used: set[str] = set()
        self._decade = 1700 + 10 * dice.below(20)

    def _new(self, items: Sequence[str]) -> str:
        first_part = self._names.first_part
        while (key := first_part.get(item := self._dice.choose(items), item)) in self._used:
            pass
        self._used.add(key)
        return item

    def value(self, kind: str) -> str:
        """A value of one of the kinds of relations."""
        if kind == "person":
            return f"{self._new(THEMES.women + THEMES.men)} {self._new(self._names.surnames)}"
        if kind == "place":
            return self._new(self._names.places)
        return self._new([str(self._decade + n) for n in range(40)])

    def entity(self, theme: str) -> str:
        """The name of a thing of this theme."""
        if theme == "ship":
            return "the " + self._new(self._names.ships)
        if theme == "treasure":
            return f"the {self._new(self._names.places)} {self._dice.choose(THEMES.treasures)}"
        return f"the {self._new(self._names.surnames)} {self._dice.choose(THEMES.heirlooms)}"


def capital(text: str) -> str:
    """The text with a capital first letter, otherwise unchanged."""
    return text[:1].upper() + text[1:]


def _predicates(dice: Dice, facts: Sequence[Fact]) -> list[str]:
    """The predicate of each sentence, with one or two facts each."""
    predicates: list[str] = []
    joined = True
    for number, fact in enumerate(facts):
        predicate = dice.choose(fact.relation.predicates).replace("{v}", f"\x01{number}\x02{fact.value}\x03")
        joined = not joined and dice.chance(0.3)
        if joined:
            if predicates[-1].startswith("was "):
                predicate = predicate.removeprefix("was ")
            predicates[-1] += f" and {predicate}"
        else:
            predicates.append(predicate)
    return predicates


def make_passage(dice: Dice, names: Names, theme: str, untold: int) -> Passage:
    """One passage: all facts with one kind of value except `untold` of them, in random order."""
    values = Values(dice, names)
    entity = values.entity(theme)
    kind = dice.choose([*THEMES.relations])
    relations = dice.shuffled(THEMES.relations[kind])
    facts = [Fact(relation, values.value(kind)) for relation in relations[untold:]]
    sentences: list[str] = []
    for number, predicate in enumerate(_predicates(dice, facts)):
        subject = "it" if number and dice.chance(0.8) else entity
        sentences.append(capital(f"{subject} {predicate}."))
    text = " ".join([*sentences, dice.choose(THEMES.asides)]).strip()
    starts = [0] * len(facts)
    removed = 0
    for mark in _MARK.finditer(text):
        starts[int(mark[1])] = mark.start() - removed
        removed += len(mark[0]) - len(mark[2])
    return Passage(_MARK.sub(r"\2", text), entity, facts, starts, relations[:untold])
