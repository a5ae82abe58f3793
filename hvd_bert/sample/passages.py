"""Passages: which things one tells of, the facts, the sentences, and where in the text each value stands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_bert.sample import themes
from hvd_bert.sample.dice import Dice
from hvd_bert.sample.names import Names
from hvd_bert.sample.themes import THEMES, Relation, Theme

# Shares of four kinds of passages. "mixed": things of different kinds (a ship, a town, a firm); "sisters": two
# things of one kind; in both no two values are of one kind, so that the kind asked for must be found, and no more.
# "alike" is "mixed" with values of the same kinds, told apart by the words around them; "rivals" are two things of
# one kind with the same facts, told apart by name. The last two are the hard ones, and few.
KINDS = (("mixed", 0.60), ("sisters", 0.28), ("alike", 0.06), ("rivals", 0.06))
# Kinds of values that most themes have; in an "alike" passage the things are given the same two where they can.
COMMON_VALUES = ("person", "year", "place", "count")
# A value's place in a passage under construction: the fact's number, the value, the end.
_MARK = re.compile("\x01(\\d+)\x02([^\x03]*)\x03")


@dataclass(frozen=True)
class Entity:
    """A thing that facts are told of; `short` names it when it has been introduced."""

    theme: Theme
    name: str
    short: str
    pronoun: str


@dataclass(frozen=True)
class Fact:
    entity: int
    relation: str
    value: str


@dataclass(frozen=True)
class Passage:
    """`starts[i]` is where the value of `facts[i]` starts in `context`."""

    context: str
    entities: list[Entity]
    facts: list[Fact]
    starts: list[int]

    def relation(self, fact: Fact) -> Relation:
        return self.entities[fact.entity].theme.relations[fact.relation]


class Values:
    """Draws names and values for one passage, never the same twice, nor two names with the same first part."""

    def __init__(self, dice: Dice, names: Names, place: str = "") -> None:
        """`place`: a name that is taken already."""
        self._dice = dice
        self._names = names
        self._used = {names.first_part[place]} if place else set()

    def _new(self, items: Sequence[str]) -> str:
        first_part = self._names.first_part
        while (key := first_part.get(item := self._dice.choose(items), item)) in self._used:
            pass
        self._used.add(key)
        return item

    def _number(self, low: int, high: int, step: int) -> str:
        return self._new([f"{n:,}" for n in range(low, high, step)])

    def value(self, kind: str) -> str:
        """A value of a relation's kind."""
        if kind == "person":
            return f"{self._new(themes.WOMEN + themes.MEN)} {self._new(self._names.surnames)}"
        if kind == "year":
            return str(1700 + self._dice.below(240))
        if kind == "count":
            return self._number(20, 400, 1)
        if kind == "large":
            return self._number(1100, 9900, 100)
        lists: dict[str, Sequence[str]] = {
            "place": self._names.places,
            "river": self._names.rivers,
            "trade": themes.TRADES,
            "instrument": themes.INSTRUMENTS,
            "goods": themes.GOODS,
            "product": themes.PRODUCTS,
            "month": themes.MONTHS,
            "material": themes.MATERIALS,
            "collection": themes.COLLECTIONS,
            "colour": themes.COLOURS,
            "use": themes.USES,
        }
        return self._new(lists[kind])

    def entity(self, theme: Theme) -> Entity:
        """A thing of a theme's kind."""
        kind = theme.entity
        if kind == "person":
            woman = self._dice.chance(0.5)
            first = self._new(themes.WOMEN if woman else themes.MEN)
            last = self._new(self._names.surnames)
            return Entity(theme, f"{first} {last}", last, "she" if woman else "he")
        if kind == "place":
            name = self._new(self._names.places)
        elif kind == "ship":
            name = "the " + self._new(self._names.ships)
        elif kind == "book":
            name = "The " + self._new(self._names.books)
        elif kind == "building":
            name = f"the {self._new(self._names.places)} {self._dice.choose(themes.BUILDINGS)}"
        elif kind == "firm":
            name = f"{self._new(self._names.surnames)} {self._dice.choose(themes.FIRMS)}"
        else:
            name = self._new(self._names.plants)
        return Entity(theme, name, name, "it")


def capital(text: str) -> str:
    """The text with a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


def _join(dice: Dice, pronoun: str, first: str, second: str) -> str:
    """Two predicates with one subject: the first as a relative clause, or both in a row, a shared verb said once."""
    if dice.chance(0.3):
        return f", {'which' if pronoun == 'it' else 'who'} {first}, {second}"
    verb, _, rest = second.partition(" ")
    if verb in ("was", "is", "has") and first.startswith(verb + " "):
        second = rest
    return f" {first} and {second}"


def _sentences(dice: Dice, facts: Sequence[Fact], entities: Sequence[Entity]) -> list[tuple[int, str]]:
    """(entity, what follows its name), in the order of the passage; one or two facts each."""
    per_entity: list[list[tuple[int, str]]] = []
    for entity, thing in enumerate(entities):
        said: list[tuple[int, str]] = []
        pending = ""
        for number in dice.sample([i for i, fact in enumerate(facts) if fact.entity == entity], len(facts)):
            fact = facts[number]
            predicate = dice.choose(thing.theme.relations[fact.relation].predicates)
            predicate = predicate.replace("{v}", f"\x01{number}\x02{fact.value}\x03")
            if pending and predicate.split()[:2] != pending.split()[:2]:
                said.append((entity, _join(dice, thing.pronoun, pending, predicate)))
                pending = ""
                continue
            if pending:
                said.append((entity, " " + pending))
            pending = predicate if dice.chance(0.5) else ""
            if not pending:
                said.append((entity, " " + predicate))
        if pending:
            said.append((entity, " " + pending))
        per_entity.append(said)
    if len(entities) == 1 or dice.chance(0.6):
        return [sentence for said in per_entity for sentence in said]
    mixed: list[tuple[int, str]] = []
    while any(per_entity):
        mixed.append(dice.choose([said for said in per_entity if said]).pop(0))
    return mixed


def _subject(dice: Dice, entity: Entity, seen: bool, pronoun_fits: bool) -> str:
    if not seen:
        return entity.name
    if pronoun_fits and dice.chance(0.5):
        return entity.pronoun
    return entity.short if dice.chance(0.5) else entity.name


def _alike(dice: Dice, theme: Theme, wanted: Sequence[str], count: int) -> list[str]:
    """Relations of a theme, first those with the wanted kinds of values."""
    names = dice.sample(list(theme.relations), len(theme.relations))
    return sorted(names, key=lambda name: theme.relations[name].value not in wanted)[:count]


def _different(dice: Dice, theme: Theme, count: int, used: set[str]) -> list[str]:
    """Relations of a theme whose values are of no kind in `used`; their kinds are added to it."""
    found: list[str] = []
    for name in dice.sample(list(theme.relations), len(theme.relations)):
        value = theme.relations[name].value
        if len(found) < count and value not in used:
            found.append(name)
            used.add(value)
    return found


def _facts(dice: Dice, values: Values, theme: Theme) -> tuple[list[Entity], list[Fact]]:
    """The things a passage tells of, the first of them of the given theme, and what it tells."""
    kind = dice.weighted(KINDS)
    themes_told = [theme, theme]
    if kind in ("mixed", "alike"):
        themes_told = [theme, *dice.sample([other for other in THEMES if other != theme], 1 + dice.below(2))]
    entities = [values.entity(which) for which in themes_told]
    each = 2 if kind == "rivals" or len(entities) == 3 else 3
    if kind == "alike":
        wanted = dice.sample(COMMON_VALUES, 2)
        told = [_alike(dice, entity.theme, wanted, each) for entity in entities]
    elif kind == "rivals":
        told = [dice.sample(list(theme.relations), each)] * 2
    else:
        used = {entity.theme.entity for entity in entities}  # a town or a person told of is such a value too
        told = [_different(dice, entity.theme, each, used) for entity in entities]
    facts = [
        Fact(number, relation, values.value(entity.theme.relations[relation].value))
        for number, entity in enumerate(entities)
        for relation in told[number]
    ]
    return entities, facts


def make_passage(dice: Dice, names: Names, theme: Theme, place: str) -> Passage:
    """One passage of a theme; `place` is where the article is about."""
    entities, facts = _facts(dice, Values(dice, names, place), theme)
    text = dice.choose(theme.openers).replace("{p}", place)
    seen: set[int] = set()
    before = -1
    for entity, predicate in _sentences(dice, facts, entities):
        pronoun_fits = entity == before and not predicate.startswith(",")
        subject = _subject(dice, entities[entity], entity in seen, pronoun_fits)
        lead = dice.choose(themes.LEADS) if dice.chance(0.15) else ""
        text += " " + capital(f"{lead}{subject}{predicate}.")
        seen.add(entity)
        before = entity
    return _unmark(text, entities, facts)


def _unmark(text: str, entities: list[Entity], facts: list[Fact]) -> Passage:
    starts = [0] * len(facts)
    removed = 0
    for mark in _MARK.finditer(text):
        starts[int(mark[1])] = mark.start() - removed
        removed += len(mark[0]) - len(mark[2])
    return Passage(_MARK.sub(r"\2", text), entities, facts, starts)
