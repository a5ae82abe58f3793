"""The sample: valid SQuAD without names of dev in train, and a tokenizer that knows its words and any other text."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

from launch import SAMPLE
from tables import each
from transformers import AutoTokenizer, BertConfig

FILES = [f"{split}-v{version}.json.gz" for split in ("train", "dev") for version in ("1.1", "2.0")]


def questions(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for article in json.loads(gzip.decompress((SAMPLE / name).read_bytes()))["data"]:
        for paragraph in article["paragraphs"]:
            for row in paragraph["qas"]:
                yield article["title"], paragraph["context"], row


@each("name", FILES)
def test_file_is_valid_squad(name: str) -> None:
    rows = list(questions(name))
    ids = [row["id"] for _, _, row in rows]
    assert len(ids) == len(set(ids)) > 300
    for title, context, row in rows:
        assert title and row["question"].endswith("?")
        for answer in row["answers"] + row.get("plausible_answers", []):
            assert context[answer["answer_start"] :].startswith(answer["text"])
        assert bool(row["answers"]) != row.get("is_impossible", False)
    if "v2" in name:
        assert 0.28 < sum(row["is_impossible"] for _, _, row in rows) / len(rows) < 0.39


@each("version", ["1.1", "2.0"])
def test_answers_of_dev_are_not_learned_by_heart(version: str) -> None:
    """Persons and towns of dev never occur in train, so that a model must read the passage. Years do."""
    train, dev = (list(questions(f"{split}-v{version}.json.gz")) for split in ("train", "dev"))
    learned = {context for _, context, _ in train}
    names = {answer["text"] for _, _, row in dev for answer in row["answers"] if not answer["text"].isdigit()}
    assert len(names) > 50 and not [name for name in names if any(name in context for context in learned)]


@each("name", FILES)
def test_tokenizer_knows_every_word_and_any_other_text(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(SAMPLE))
    assert len(tokenizer) == BertConfig.from_pretrained(str(SAMPLE)).vocab_size
    assert "[UNK]" not in tokenizer.tokenize("Xylophones — “quoted” café & 3.5% (ß) {x} ~ zzz?")
    tokens = [tokenizer.tokenize(context) for context in {context for _, context, _ in questions(name)}]
    pieces = {piece for words in tokens for piece in words}
    assert "[UNK]" not in pieces and not [piece for piece in pieces if re.fullmatch(r"##[a-z]|[b-z]", piece)]
    assert max(map(len, tokens)) <= 50
