"""Make the sample: `python -m hvd_bert.sample.generate --out DIR`.

Writes train and dev questions in SQuAD's own JSON (v1.1 and v2.0) and the vocabulary that fits them. A passage
tells of several things, and a question can be answered only by finding in it the fact asked for: mostly by the
kind of its value, in the harder passages by the words around it or by the thing's name (`passages.KINDS`).
Composed names (towns, surnames, rivers, plants, ships, books) are split between train and dev: no such name of a
dev passage occurs as a whole in train, though its two parts do.

The same seed gives the same bytes everywhere: only `random.Random.random()` is used, whose stream Python guarantees.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_bert.sample.dice import Dice
from hvd_bert.sample.names import Names
from hvd_bert.sample.passages import Fact, Passage, Values, capital, make_passage
from hvd_bert.sample.themes import THEMES, Relation
from hvd_bert.sample.vocabulary import vocabulary

SEED = 2
# passages in each file, and the most questions asked of one
SIZES = {"train": 1200, "dev": 100}
QUESTIONS_PER_PASSAGE = 6
PASSAGES_PER_ARTICLE = 5
NO_ANSWER_SHARE = 1 / 3
STRANGER_SHARE = 0.1


def _answers(passage: Passage, number: int, split: str) -> list[dict[str, Any]]:
    """The answer; a dev question on a number also takes it with its unit, as SQuAD's several annotators would."""
    fact, start = passage.facts[number], passage.starts[number]
    answers = [{"text": fact.value, "answer_start": start}]
    unit = passage.relation(fact).unit
    longer = f"{fact.value} {unit}"
    if split == "dev" and unit and passage.context.startswith(longer, start):
        answers.append({"text": longer, "answer_start": start})
    return answers


def _asked(dice: Dice, relation: Relation, entity: str) -> str:
    return capital(dice.choose(relation.questions).replace("{e}", entity))


def _no_answer(dice: Dice, names: Names, passage: Passage) -> tuple[str, Fact]:
    """A question the passage does not answer, and a fact whose value looks like the answer."""
    if dice.chance(STRANGER_SHARE):
        # The fact is told, but of another thing.
        fact = dice.choose(passage.facts)
        while True:
            stranger = Values(dice, names).entity(passage.entities[fact.entity].theme)
            if stranger.short not in passage.context:
                return _asked(dice, passage.relation(fact), stranger.name), fact
    # The thing is told of, but not this fact; best one whose kind of value the passage lacks.
    number = dice.below(len(passage.entities))
    thing = passage.entities[number]
    own = {fact.relation for fact in passage.facts if fact.entity == number}
    values = {passage.relation(fact).value for fact in passage.facts}
    absent = [relation for name, relation in thing.theme.relations.items() if name not in own]
    relation = dice.choose([relation for relation in absent if relation.value not in values] or absent)
    alike = [fact for fact in passage.facts if passage.relation(fact).value == relation.value]
    return _asked(dice, relation, thing.name), dice.choose(alike or passage.facts)


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
        question = _asked(dice, passage.relation(fact), passage.entities[fact.entity].name)
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
            passage = make_passage(dice, names, theme, place)
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
