"""Make the sample: `python -m hvd_bert.sample.generate --out DIR`.

Writes train and dev questions in SQuAD's own JSON (v1.1 and v2.0) and the vocabulary that fits them. A passage
tells the same kinds of facts of several things, so a question can be answered only by finding in the passage both
the thing and the fact it asks for. Composed names (towns, surnames, rivers, plants, ships, books) are split between
train and dev: no such name of a dev passage occurs as a whole in train, though its two parts do.

The same seed gives the same bytes everywhere: only `random.Random.random()` is used, whose stream Python guarantees.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hvd_bert.sample import themes
from hvd_bert.sample.names import Names
from hvd_bert.sample.themes import THEMES, Relation, Theme
from hvd_bert.sample.vocabulary import vocabulary

T = TypeVar("T")

SEED = 2
# passages in each file, and the most questions asked of one
SIZES = {"train": 900, "dev": 90}
QUESTIONS_PER_PASSAGE = 7
PASSAGES_PER_ARTICLE = 5
# How many things a passage tells of: (share, things, facts of each). Passages about one thing let a model learn
# first what is asked for, and only then of whom; dev has none of them.
SHAPES = {
    "train": ((0.25, 1, 4), (0.45, 2, 3), (0.30, 3, 2)),
    "dev": ((0.60, 2, 3), (0.40, 3, 2)),
}
NO_ANSWER_SHARE = 1 / 3
# A value's place in a passage under construction: the fact's number, the value, the end.
_MARK = re.compile("\x01(\\d+)\x02([^\x03]*)\x03")


class Dice:
    """Choices that depend on nothing but `Random.random()`."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def chance(self, p: float) -> bool:
        return self._random.random() < p

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def choose(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """k different items in random order (fewer where there are fewer)."""
        left, out = list(items), []
        while left and len(out) < k:
            out.append(left.pop(self.below(len(left))))
        return out


@dataclass(frozen=True)
class Entity:
    """A thing that facts are told of; `short` names it when it has been introduced."""

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

    theme: Theme
    context: str
    entities: list[Entity]
    facts: list[Fact]
    starts: list[int]


class Values:
    """Draws names and values for one passage, never the same twice."""

    def __init__(self, dice: Dice, names: Names) -> None:
        self._dice = dice
        self._names = names
        self._used: set[str] = set()

    def _new(self, items: Sequence[str]) -> str:
        while (item := self._dice.choose(items)) in self._used:
            pass
        self._used.add(item)
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
            "place": self._names.places, "river": self._names.rivers, "trade": themes.TRADES,
            "instrument": themes.INSTRUMENTS, "goods": themes.GOODS, "product": themes.PRODUCTS,
            "month": themes.MONTHS, "material": themes.MATERIALS, "collection": themes.COLLECTIONS,
            "colour": themes.COLOURS, "use": themes.USES,
        }
        return self._new(lists[kind])

    def entity(self, kind: str) -> Entity:
        """A thing of a theme's kind."""
        if kind == "person":
            woman = self._dice.chance(0.5)
            first = self._new(themes.WOMEN if woman else themes.MEN)
            last = self._new(self._names.surnames)
            return Entity(f"{first} {last}", last, "she" if woman else "he")
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
        return Entity(name, name, "it")


def _capital(text: str) -> str:
    # A sentence may open with a marked value, whose own capital is its own affair.
    return text[:1].upper() + text[1:]


def _join(first: str, second: str) -> str:
    """Two predicates with one subject; a verb they share is said once."""
    verb, _, rest = second.partition(" ")
    if verb in ("was", "is", "has") and first.startswith(verb + " "):
        second = rest
    return f"{first} and {second}"


def _sentences(dice: Dice, theme: Theme, facts: Sequence[Fact], things: int) -> list[tuple[int, str]]:
    """(entity, what is said of it), in the order of the passage; one or two facts each."""
    per_entity: list[list[tuple[int, str]]] = []
    for entity in range(things):
        said: list[tuple[int, str]] = []
        pending = ""
        for number in dice.sample([i for i, fact in enumerate(facts) if fact.entity == entity], len(facts)):
            fact = facts[number]
            predicate = dice.choose(theme.relations[fact.relation].predicates)
            predicate = predicate.replace("{v}", f"\x01{number}\x02{fact.value}\x03")
            if pending and predicate.split()[:2] != pending.split()[:2]:
                said.append((entity, _join(pending, predicate)))
                pending = ""
                continue
            if pending:
                said.append((entity, pending))
            pending = predicate if dice.chance(0.5) else ""
            if not pending:
                said.append((entity, predicate))
        if pending:
            said.append((entity, pending))
        per_entity.append(said)
    if things == 1 or dice.chance(0.6):
        return [sentence for said in per_entity for sentence in said]
    mixed: list[tuple[int, str]] = []
    while any(per_entity):
        mixed.append(dice.choose([said for said in per_entity if said]).pop(0))
    return mixed


def _subject(dice: Dice, entity: Entity, seen: bool, same_as_before: bool) -> str:
    if not seen:
        return entity.name
    if same_as_before and dice.chance(0.5):
        return entity.pronoun
    return entity.short if dice.chance(0.5) else entity.name


def make_passage(dice: Dice, names: Names, split: str, theme: Theme, place: str) -> Passage:
    """One passage of a theme; `place` is where the article is about."""
    values = Values(dice, names)
    _, things, facts_each = _shape(dice, split)
    entities = [values.entity(theme.entity) for _ in range(things)]
    # Things share most of their relations, so that the relation alone does not give the answer.
    pool = dice.sample(list(theme.relations), facts_each + 1)
    facts = [Fact(entity, relation, values.value(theme.relations[relation].value))
             for entity in range(things) for relation in dice.sample(pool, facts_each)]
    text = dice.choose(theme.openers).replace("{p}", place)
    seen: set[int] = set()
    before = -1
    for entity, predicate in _sentences(dice, theme, facts, things):
        subject = _subject(dice, entities[entity], entity in seen, entity == before)
        lead = dice.choose(themes.LEADS) if dice.chance(0.2) else ""
        text += " " + _capital(f"{lead}{subject} {predicate}.")
        seen.add(entity)
        before = entity
    return _unmark(theme, text, entities, facts)


def _shape(dice: Dice, split: str) -> tuple[float, int, int]:
    draw = dice.below(1000) / 1000
    for shape in SHAPES[split]:
        draw -= shape[0]
        if draw < 0:
            return shape
    return SHAPES[split][-1]


def _unmark(theme: Theme, text: str, entities: list[Entity], facts: list[Fact]) -> Passage:
    starts = [0] * len(facts)
    removed = 0
    for mark in _MARK.finditer(text):
        starts[int(mark[1])] = mark.start() - removed
        removed += len(mark[0]) - len(mark[2])
    return Passage(theme, _MARK.sub(r"\2", text), entities, facts, starts)


def _answers(passage: Passage, number: int, split: str) -> list[dict[str, Any]]:
    """The answer; a dev question on a number also takes it with its unit, as SQuAD's several annotators would."""
    fact, start = passage.facts[number], passage.starts[number]
    answers = [{"text": fact.value, "answer_start": start}]
    unit = passage.theme.relations[fact.relation].unit
    longer = f"{fact.value} {unit}"
    if split == "dev" and unit and passage.context.startswith(longer, start):
        answers.append({"text": longer, "answer_start": start})
    return answers


def _asked(dice: Dice, relation: Relation, entity: str) -> str:
    return _capital(dice.choose(relation.questions).replace("{e}", entity))


def _no_answer(dice: Dice, names: Names, passage: Passage) -> tuple[str, Fact]:
    """A question the passage does not answer, and the fact of another thing that looks like the answer."""
    number = dice.below(len(passage.facts))
    fact = passage.facts[number]
    relation = passage.theme.relations[fact.relation]
    has_it = {other.entity for other in passage.facts if other.relation == fact.relation}
    others = [i for i in range(len(passage.entities)) if i not in has_it]
    if others and dice.chance(0.6):
        return _asked(dice, relation, passage.entities[dice.choose(others)].name), fact
    while True:
        stranger = Values(dice, names).entity(passage.theme.entity)
        if stranger.short not in passage.context:
            return _asked(dice, relation, stranger.name), fact


def ask(dice: Dice, names: Names, passage: Passage, split: str, v2: bool) -> Iterator[dict[str, Any]]:
    """The questions of a passage, without their ids."""
    for number in dice.sample(range(len(passage.facts)), QUESTIONS_PER_PASSAGE):
        fact = passage.facts[number]
        if v2 and dice.chance(NO_ANSWER_SHARE):
            question, like = _no_answer(dice, names, passage)
            start = passage.starts[passage.facts.index(like)]
            plausible = [{"text": like.value, "answer_start": start}]
            yield {"question": question, "answers": [], "plausible_answers": plausible, "is_impossible": True}
            continue
        question = _asked(dice, passage.theme.relations[fact.relation], passage.entities[fact.entity].name)
        row: dict[str, Any] = {"question": question, "answers": _answers(passage, number, split)}
        yield {**row, "is_impossible": False} if v2 else row


def make_split(split: str, v2: bool, seed: int) -> dict[str, Any]:
    """A whole file's content in SQuAD's form."""
    version = "v2.0" if v2 else "1.1"
    dice = Dice(f"{seed}/{split}/{version}")
    names = Names.of(split)
    articles = []
    questions = 0
    for _ in range(SIZES[split] // PASSAGES_PER_ARTICLE):
        theme, place = dice.choose(THEMES), dice.choose(names.places)
        paragraphs = []
        for _ in range(PASSAGES_PER_ARTICLE):
            passage = make_passage(dice, names, split, theme, place)
            rows = []
            for row in ask(dice, names, passage, split, v2):
                rows.append({"id": f"{split}{'2' if v2 else '1'}-{questions:05d}", **row})
                questions += 1
            paragraphs.append({"context": passage.context, "qas": rows})
        articles.append({"title": dice.choose(theme.titles).replace("{p}", place), "paragraphs": paragraphs})
    return {"version": version, "data": articles}


def write(out: Path, seed: int = SEED) -> list[Path]:
    """Write the four files and the vocabulary into `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for split in ("train", "dev"):
        for v2 in (False, True):
            path = out / f"{split}-v{'2.0' if v2 else '1.1'}.json"
            text = json.dumps(make_split(split, v2, seed), separators=(",", ":"))
            path.write_text(text + "\n", encoding="utf-8", newline="\n")
            paths.append(path)
    path = out / "vocab.txt"
    path.write_text("".join(f"{piece}\n" for piece in vocabulary()), encoding="utf-8", newline="\n")
    return [*paths, path]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the sample questions and their vocabulary.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to; made if missing")
    parser.add_argument("--seed", type=int, default=SEED, help=f"default {SEED}, which gives the files that ship")
    args = parser.parse_args(argv)
    for path in write(args.out, args.seed):
        print(f"{path}  {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
