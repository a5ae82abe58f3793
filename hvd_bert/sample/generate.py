"""Generate the sample: `python -m hvd_bert.sample.generate --out DIR`.

Writes train and dev questions in SQuAD's JSON (v1.1 and v2.0) and the matching vocabulary. A passage states three
facts about one thing. Their values are all of one kind (persons, towns or years), so answering a question requires
matching it with the right sentence, which mostly uses other words. In v2.0, a passage states only two of the facts, and
a question also asks for the third. Composed names (towns, surnames, ships) are split between train and dev: a name of
dev never occurs as a whole in train, though both of its parts do.

The same seed gives the same bytes everywhere: only `random.Random.random()` is used, whose sequence Python guarantees.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvd_bert.sample.passages import THEMES, Dice, Names, Passage, Relation, capital, make_passage, vocabulary
from hvd_bert.streams import keep_running

SEED = 2
# Passages per file; the four files stay under 6 MB.
SIZES = {"train": 4700, "dev": 200}
PASSAGES_PER_ARTICLE = 5
VOCABULARY = "vocab.txt"
NAMES = ("train-v1.1.json", "train-v2.0.json", "dev-v1.1.json", "dev-v2.0.json", VOCABULARY)


def _answers(passage: Passage, number: int, split: str) -> list[dict[str, Any]]:
    """The answer; for a dev question about a person also the surname, as another annotator of SQuAD might answer."""
    value, start = passage.facts[number].value, passage.starts[number]
    answers = [{"text": value, "answer_start": start}]
    first, _, surname = value.partition(" ")
    if split == "dev" and surname:
        answers.append({"text": surname, "answer_start": start + len(first) + 1})
    return answers


def _question(dice: Dice, passage: Passage, relation: Relation) -> str:
    return capital(dice.choose(relation.questions).replace("{e}", passage.entity))


def ask(dice: Dice, passage: Passage, split: str, v2: bool) -> Iterator[dict[str, Any]]:
    """The questions about a passage, without ids: one per fact, and one per fact that it does not state."""
    for number in dice.shuffled(range(len(passage.facts))):
        answers = _answers(passage, number, split)
        row = {"question": _question(dice, passage, passage.facts[number].relation), "answers": answers}
        yield {**row, "is_impossible": False} if v2 else row
    for relation in passage.untold:
        plausible = _answers(passage, dice.below(len(passage.facts)), split)[:1]
        question = _question(dice, passage, relation)
        yield {"question": question, "answers": [], "plausible_answers": plausible, "is_impossible": True}


def make_split(split: str, v2: bool, seed: int) -> dict[str, Any]:
    """The content of a file in SQuAD's format."""
    version = "v2.0" if v2 else "1.1"
    dice = Dice(f"{seed}/{split}/{version}")
    names = Names(split)
    articles = []
    questions = 0
    for _ in range(SIZES[split] // PASSAGES_PER_ARTICLE):
        theme, place = dice.choose([*THEMES.titles]), dice.choose(names.places)
        paragraphs = []
        for _ in range(PASSAGES_PER_ARTICLE):
            passage = make_passage(dice, names, theme, untold=int(v2))
            rows = []
            for row in ask(dice, passage, split, v2):
                rows.append({"id": f"{split}{'2' if v2 else '1'}-{questions:05d}", **row})
                questions += 1
            paragraphs.append({"context": passage.context, "qas": rows})
        articles.append({"title": dice.choose(THEMES.titles[theme]).replace("{p}", place), "paragraphs": paragraphs})
    return {"version": version, "data": articles}


def content(name: str, seed: int = SEED) -> bytes:
    """The content of the file `name`, one of NAMES."""
    if name == VOCABULARY:
        return "".join(f"{piece}\n" for piece in vocabulary()).encode()
    split, version = name.removesuffix(".json").split("-v")
    return (json.dumps(make_split(split, version == "2.0", seed), separators=(",", ":")) + "\n").encode()


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m hvd_bert.sample.generate",
        description="Write the sample's questions (SQuAD v1.1 and v2.0 JSON) and their vocabulary.",
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="Folder; created if missing. (required)")
    seed = "Seed of the random text; the default gives the files that training uses. (default: %(default)s)"
    parser.add_argument("--seed", metavar="N", type=int, default=SEED, help=seed)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    if not args.out:  # as a path, it would be the working directory
        parser.error("--out is empty: name a folder")
    try:
        _write(parser, Path(args.out), args.seed)
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be written: {error}")


def _write(parser: argparse.ArgumentParser, folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        path, made = folder / name, content(name, seed)
        if path.exists() and path.read_bytes() != made:  # perhaps SQuAD's own file, which has the same name
            parser.error(f"{path} exists and has another content: move it away, or choose another --out")
        path.write_bytes(made)
        print(f"{path}  {len(made):,} bytes  sha256 {hashlib.sha256(made).hexdigest()}")


if __name__ == "__main__":
    keep_running()
    main()
