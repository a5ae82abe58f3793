"""Tag words, for example names in a text: a variation of several_answers.py.

    PYTHONPATH=examples python -m hvd_bert.train --task tagger:Tagger --strategy none \
        --train_file train.jsonl --validation_file dev.jsonl --output_dir runs/tags

A row has a list of words in "words", and a tag per word in "tags".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import datasets
from several_answers import SeveralAnswers
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from transformers import AutoModelForTokenClassification

from hvd_bert.config.settings import Config
from hvd_bert.tasks.dataset import Examples
from hvd_bert.tasks.encoder import IGNORED
from hvd_bert.tasks.rows import column, load_rows


class Tagger(SeveralAnswers):
    """A task that predicts a tag for each word, from the word's first token."""

    unit = "texts"
    metrics: Mapping[str, Literal["max", "min"]] = {"f1": "max", "accuracy": "max", "eval_loss": "min"}

    def load(self, config: Config) -> None:
        train, dev = load_rows(config, "train"), load_rows(config, "validation")
        tags = {tag for of_words in column(train, "tags") for tag in of_words} if train else ()
        self.load_model(AutoModelForTokenClassification, sorted(tags))
        self.train, self.dev = (rows and self.tagged(rows, column(rows, "tags")) for rows in (train, dev))

    def tagged(self, rows: datasets.Dataset, tags: Sequence[Sequence[str]]) -> Examples:
        texts = self.encode(column(rows, "words"), is_split_into_words=True)
        labels = []
        for number, of_words in enumerate(tags):
            words = texts.word_ids(number)  # None for special tokens
            starts = [word is not None and word != before for before, word in pairwise([None, *words])]
            first = zip(words, starts, strict=True)
            labels.append([self.classes.index(of_words[word]) if start else IGNORED for word, start in first])
        return self.examples(texts, labels)

    def inputs(self, rows: datasets.Dataset) -> Examples:
        return self.tagged(rows, [[self.classes[0]] * len(words) for words in column(rows, "words")])

    def score(self, outputs: Tensor) -> dict[str, float]:
        found, labels = outputs[outputs[..., 1] != IGNORED].unbind(-1)
        f1 = f1_score(labels, found, average="macro")
        return {"f1": float(f1), "accuracy": float(accuracy_score(labels, found))}

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        return {"tags": [[self.classes[tag] for tag in row[row[:, 1] != IGNORED, 0]] for row in outputs]}
