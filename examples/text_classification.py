"""Classify texts or pairs of texts: a custom task on packed texts.

    export PYTHONPATH=examples
    python -m hvd_bert.train --task text_classification:TextClassification --strategy none \
        --train_file train.csv --validation_file dev.csv --max_seq_length 128 --output_dir runs/texts
    horovodrun -np 2 -H localhost:2 python -m hvd_bert.train --task text_classification:TextClassification \
        --dataset_name glue --dataset_config_name sst2 --max_seq_length 128 --output_dir runs/sst2
    hvd-bert predict runs/texts --input new.csv --output classes.csv

Files are CSV, TSV, JSON Lines or Parquet with the class in `label`. For other columns or splits, write a subclass with
other class attributes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import datasets
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

from hvd_bert.config.settings import Config
from hvd_bert.errors import UserError, log
from hvd_bert.tasks.dataset import Examples
from hvd_bert.tasks.encoder import EncoderTask, Labelled
from hvd_bert.tasks.rows import column, load_rows, text_column

MISSING = ("na", "nan", "none", "null", "<na>")  # words that programs write for a missing value


def number(text: str) -> float | None:
    """Parse a finite number. Returns None if the text is not a finite number."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_text(cell: str | None) -> bool:
    """Return whether a cell of a CSV file is neither a number nor true or false."""
    return number(str(cell)) is None and str(cell).lower() not in ("true", "false")


class TextClassification(EncoderTask):
    """A task that predicts the class of a text, or of a pair of texts."""

    metrics: Mapping[str, Literal["max", "min"]] = {
        "accuracy": "max",
        "f1": "max",
        "matthews_correlation": "max",
        "eval_loss": "min",
    }
    label_column: ClassVar[str] = "label"
    # Names of one or two columns. Default: sentence1 and sentence2 if present, else the first one or two text columns.
    text_columns: ClassVar[Sequence[str]] = ()
    # Splits of --dataset_name. The default validation split of MNLI is validation_matched.
    train_split: ClassVar[str] = "train"
    validation_split: ClassVar[str | None] = None

    def load(self, config: Config) -> None:
        of_mnli = "validation_matched" if config.data.dataset_config_name == "mnli" else None
        train = load_rows(config, "train", self.train_split)
        dev = load_rows(config, "validation", self.validation_split or of_mnli)
        rows = dev if train is None else train
        self.load_model(AutoModelForSequenceClassification, self.class_names(rows, train is not None))
        if not self.trained:
            self.model.config.text_columns = self.found_columns(rows)  # config.json stores them for predictions
        log.info("Texts: %s. Classes: %s.", ", ".join(self.model.config.text_columns), ", ".join(self.classes))
        self.train = None if train is None else self.labelled(train)
        self.dev = None if dev is None else self.labelled(dev)
        self.labels = [] if dev is None else self.targets(dev)

    def class_names(self, rows: datasets.Dataset | None, trains: bool) -> list[str]:
        """Return the data set's own class names or, without these, the sorted labels of the training data.

        Returns an empty list if there is neither, as for a prediction.
        """
        if rows is None:
            return []
        kind = rows.features.get(self.label_column)
        if isinstance(kind, datasets.ClassLabel):
            return list(kind.names)
        labels = self.given_labels(rows) if trains else []
        names = sorted({*labels}, key=lambda name: (number(name) is None, number(name) or 0.0, name))
        if len(names) == 1:
            raise UserError(f"All labels in `{self.label_column}` are {names[0]}. Give data with two or more classes.")
        missing = [name for name in names if name.lower() in MISSING and number(names[0]) is not None]
        if missing:
            raise UserError(
                f"Row {labels.index(missing[0]) + 1} of the {rows.split} data: the label {missing[0]!r} stands for a"
                " missing value where others are numbers. Leave the row out, or rename the label."
            )
        return names

    def given_labels(self, rows: datasets.Dataset) -> list[str]:
        """Return the label of each row as text."""
        labels, kind = column(rows, self.label_column), rows.features[self.label_column]
        if isinstance(kind, datasets.ClassLabel):
            return [kind.names[label] if label >= 0 else str(label) for label in labels]  # -1 in GLUE's test sets
        names = []
        for row, label in enumerate(labels, start=1):
            name = str(label)
            value = number(name)
            if value is not None:
                name = name.strip().removesuffix(".0")  # pandas may write 1 as 1.0
            if not isinstance(label, str | int | float) or not name.strip() or (value and not value.is_integer()):
                raise UserError(
                    f"Row {row} of the {rows.split} data: the label {label!r} is neither a text nor a whole number. Fix"
                    " it, or see examples/similarity.py for learning numbers."
                )
            names.append(name)
        return names

    def found_columns(self, rows: datasets.Dataset | None) -> list[str]:
        if self.text_columns or rows is None:
            return list(self.text_columns)
        strings = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "").endswith("string")]
        strings = [name for name in strings if name not in ("id", "idx", self.label_column)]
        found = [name for name in strings if any(map(is_text, rows[name]))] or strings
        if not found:
            raise UserError(f"No column has texts: {', '.join(rows.column_names)}. Set `text_columns` in a subclass.")
        return ["sentence1", "sentence2"] if {"sentence1", "sentence2"} <= set(found) else found[:2]

    def targets(self, rows: datasets.Dataset) -> list[Any]:
        """Return the class number of each row's label. Raises UserError for an unknown label."""
        labels, numbers = self.given_labels(rows), {name: number for number, name in enumerate(self.classes)}
        for row, label in enumerate(labels, start=1):
            if label not in numbers:
                known = ", ".join(self.classes)
                raise UserError(f"Row {row} of the {rows.split} data: {label!r} is no class. Choose from {known}.")
        return [numbers[label] for label in labels]

    def labelled(self, rows: datasets.Dataset) -> Examples:
        return self.examples(self.encoded(rows), self.targets(rows))

    def inputs(self, rows: datasets.Dataset) -> Examples:
        return self.examples(self.encoded(rows), [0] * len(rows))

    def encoded(self, rows: datasets.Dataset) -> Any:
        return self.encode(*(text_column(rows, name) for name in self.model.config.text_columns))

    def forward(self, model: nn.Module, batch: Labelled) -> tuple[Tensor, Tensor]:
        texts, labels = batch
        logits = self.logits(model, texts)
        return cross_entropy(logits, labels, reduction="none"), logits.softmax(dim=1)

    def score(self, outputs: Tensor) -> dict[str, float]:
        classes = outputs.argmax(dim=1)
        average = "binary" if len(self.classes) == 2 else "macro"
        return {
            "accuracy": float(accuracy_score(self.labels, classes)),
            "f1": float(f1_score(self.labels, classes, average=average, zero_division=0)),
            "matthews_correlation": float(matthews_corrcoef(self.labels, classes)),
        }

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        probabilities, classes = outputs.max(dim=1)
        return {"prediction": [self.classes[number] for number in classes], "probability": probabilities.tolist()}
