"""Passages: a thing, facts about it, the sentences that state them, and the position of each value in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_bert.sample import themes
from hvd_bert.sample.dice import Dice
from hvd_bert.sample.names import Names
from hvd_bert.sample.themes import RELATIONS, Relation

# Marks a value in an unfinished passage: number of the fact, value, end.
_MARK = re.compile("\x01(\\d+)\x02([^\x03]*)\x03")


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
        """A value of one of the kinds in `RELATIONS`."""
        if kind == "person":
            return f"{self._new(themes.WOMEN + themes.MEN)} {self._new(self._names.surnames)}"
        if kind == "place":
            return self._new(self._names.places)
        return self._new([str(self._decade + n) for n in range(40)])

    def entity(self, theme: str) -> str:
        """The name of a thing of this theme."""
        if theme == "ship":
            return "the " + self._new(self._names.ships)
        if theme == "treasure":
            return f"the {self._new(self._names.places)} {self._dice.choose(themes.TREASURES)}"
        return f"the {self._new(self._names.surnames)} {self._dice.choose(themes.HEIRLOOMS)}"


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
    kind = dice.choose(list(RELATIONS))
    relations = dice.sample(RELATIONS[kind], len(RELATIONS[kind]))
    facts = [Fact(relation, values.value(kind)) for relation in relations[untold:]]
    sentences: list[str] = []
    for number, predicate in enumerate(_predicates(dice, facts)):
        subject = "it" if number and dice.chance(0.8) else entity
        sentences.append(capital(f"{subject} {predicate}."))
    sentences.append(dice.choose(themes.ASIDES))
    text = " ".join(sentences).strip()
    starts = [0] * len(facts)
    removed = 0
    for mark in _MARK.finditer(text):
        starts[int(mark[1])] = mark.start() - removed
        removed += len(mark[0]) - len(mark[2])
    return Passage(_MARK.sub(r"\2", text), entity, facts, starts, relations[:untold])
