"""Labelled sentences and pairs of sentences, from files or the hub, with run_glue's choice of columns."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.data.sources import files, hub
from hvd_bert.data.sources.entries import get, shown
from hvd_bert.data.sources.files import Row
from hvd_bert.data.sources.questions import Mistake, refuse
from hvd_bert.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

PAIR = ("sentence1", "sentence2")
NOT_TEXT = ("id", "idx")
DELIMITERS = {".csv": ",", ".tsv": "\t"}  # by the ending of a file's name; others are JSON Lines or Parquet
Value = str | int | float
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python prints it
_FRACTION = re.compile(r"[+-]?(?=[0-9]*[.eE])([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# What programs write for a missing value, as pandas reads them, and what is not finite. 1e400 is not finite, either.
_NO_NUMBER = re.compile(
    rf"\s*|<?#?(n/?a)>?|null|none|[+-]?(1\.#)?(nan|inf|infinity|ind|qnan)|{_FRACTION.pattern}", re.I
)


@dataclass(frozen=True)
class Columns:
    """Columns to read. `texts`: one, or two for pairs.

    Without `texts` they are sentence1 and sentence2, else the first two columns besides `label`, id and idx. With one
    such column, the texts are single sentences. `numbers`: all labels must be numbers, for a regression.
    """

    texts: tuple[str, ...] = ()
    label: str = "label"
    numbers: bool = False

    def __post_init__(self) -> None:
        names = ",".join(self.texts)
        if "" in self.texts or len({*self.texts, self.label}) <= len(self.texts):
            raise UserError(f"--text_column_names {names}: give different names, other than {self.label}.")
        if len(self.texts) > 2:
            raise UserError(f"--text_column_names {names}: give one column or two.")

    def found_in(self, name: str, present: Sequence[str]) -> Columns:
        """With the names of the text columns. Raises UserError if a column is missing."""
        chosen: Sequence[str] = self.texts
        if not chosen:
            others = [column for column in present if column not in (self.label, *NOT_TEXT)]
            chosen = PAIR if set(PAIR) <= set(others) else others[:2]
        if chosen and {self.label, *chosen} <= set(present):
            return replace(self, texts=tuple(chosen))
        texts = " and ".join(f"`{column}`" for column in self.texts) or "one or two with text"
        raise UserError(
            f"{name}: found the columns {', '.join(present)}, but needs a column `{self.label}` and {texts}. Name the"
            " columns with --label_column_name and --text_column_names."
        )


@dataclass(frozen=True)
class Texts:
    """Texts with their labels.

    Attributes:
        second: None for single sentences.
        digest: SHA-256 of the file or of the rows.
        columns: Those that the texts and the labels are from.
        places: Where each text is, for messages.
        classes: Names of the classes in the data set's order, if it has a list of them.
    """

    name: str
    digest: str
    columns: Columns
    first: list[str]
    second: list[str] | None
    labels: list[Value]
    places: list[str]
    classes: list[str] | None = None

    def __len__(self) -> int:
        return len(self.first)

    @property
    def is_regression(self) -> bool:
        """Whether the labels are numbers to learn, not classes."""
        return self.columns.numbers or isinstance(self.labels[0], float)

    def head(self, count: int | None) -> Texts:
        """The first `count` texts; None: all."""
        second, labels, places = self.second and self.second[:count], self.labels[:count], self.places[:count]
        return replace(self, first=self.first[:count], second=second, labels=labels, places=places)


def open_file(path: str, flag: str, columns: Columns = Columns()) -> Texts:
    """All rows of a file that `flag` names. Raises UserError."""
    with files.opened(path, f"{flag} {path}") as file:
        content = file.read()
    located = list(_rows(path, content))
    first = next((row for _, row in located if isinstance(row, dict)), None)
    if first is not None:
        columns = columns.found_in(path, list(first))
    elif not located:
        raise UserError(f"{path}: there are no rows. Give a file with examples.")
    return _texts(path, hashlib.sha256(content).hexdigest(), columns, located)


def open_hub(rows: Dataset, name: str, columns: Columns = Columns()) -> Texts:
    """All rows of a split of a data set on the hub. Raises UserError."""
    if not len(rows):
        raise UserError(f"{name}: there are no rows. Name another split.")
    columns = columns.found_in(name, rows.column_names)
    rows = rows.select_columns([*columns.texts, columns.label])
    located = ((f"row {number}", row) for number, row in enumerate(rows.to_list()))
    classes = getattr(rows.features[columns.label], "names", None)
    return _texts(name, hub.digest(rows), columns, located, classes)


def _texts(name: str, digest: str, columns: Columns, located: Iterable[Row], classes: list[str] | None = None) -> Texts:
    found: list[tuple[str, Value, list[str]]] = []
    mistakes: list[str] = []
    for place, row in located:
        try:
            found.append((place, *_checked(name, place, row, columns, classes)))
        except Mistake as mistake:
            mistakes.append(str(mistake))
    refuse(name, mistakes)
    places, labels, texts = (list(column) for column in zip(*found, strict=True))
    if classes is None:
        labels = _as_numbers(name, places, labels, columns.numbers)
    parts = [list(column) for column in zip(*texts, strict=True)]
    second = parts[1] if len(parts) > 1 else None
    return Texts(name, digest, columns, parts[0], second, labels, places, classes)


def _rows(path: str, content: bytes) -> Iterator[Row]:
    """The rows with their places."""
    found = files.parsed(path, content)
    if not isinstance(found, str):
        return found
    delimiter = DELIMITERS.get(Path(path.lower().removesuffix(".gz")).suffix)
    if delimiter:  # files with tabs, such as GLUE's, do not quote: a single " is a part of the text
        return files.csv_rows(path, found, delimiter, quotes=delimiter != "\t")
    if not found.lstrip().startswith(("{", "[")):
        raise UserError(
            f"{path}: not JSON Lines ({shown(found.lstrip()[:100])}). Give one JSON object per line, or a file whose"
            " name ends in .csv or .tsv."
        )
    return files.json_lines(path, found)


def _checked(name: str, place: str, row: Any, columns: Columns, classes: list[str] | None) -> tuple[Value, list[str]]:
    """The label and the texts of a row. Raises Mistake."""
    if isinstance(row, Mistake):
        raise row
    if not isinstance(row, dict):
        raise Mistake(f"{place} is not a JSON object")
    texts = [_encodable(place, column, get(place, row, column, str)) for column in columns.texts]
    return _label(name, place, row, columns.label, classes), texts


def _encodable(place: str, column: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Mistake(f"{place}: `{column}` contains an unpaired surrogate") from None
    return value


def _label(name: str, place: str, row: dict[str, Any], column: str, classes: list[str] | None) -> Value:
    value: Any = row.get(column)
    if classes is not None and isinstance(value, int):
        if not 0 <= value < len(classes):  # -1 in the test sets of GLUE
            raise UserError(f"{name}: {place} has no label ({value}). Name a split with labels.")
        return classes[value]
    if isinstance(value, str) and value:
        return _encodable(place, column, value)
    if isinstance(value, bool) or not isinstance(value, int | float) or number_of(value) is None:
        raise Mistake(f"{place}: the label must be text or a number, not {value!r:.40}")
    return value


def _as_numbers(name: str, places: list[str], labels: list[Value], must_be: bool) -> list[Value]:
    """Numbers if all labels are (a CSV file has no types): whole ones, so that 10 is sorted after 9, or fractions.

    A missing value among numbers ("nan", "NA") is no class, and no number for a regression. Raises UserError.
    """
    numbers = [number_of(label) for label in labels]
    found = [number for number in numbers if number is not None]
    others = [str(label) for label, number in zip(labels, numbers, strict=True) if number is None]
    if not must_be and (not found or not all(map(_NO_NUMBER.fullmatch, others))):
        return [str(label) for label in labels]
    needed = "a finite number, " + ("which a regression needs" if must_be else "as the others are")
    rows = zip(places, labels, numbers, strict=True)
    refuse(name, [f"{place}: the label {label!r:.40} is not {needed}" for place, label, n in rows if n is None])
    return [float(number) for number in found] if any(isinstance(number, float) for number in found) else [*found]


def number_of(label: Value) -> int | float | None:
    """The finite number that a label is, or is the text of; "01" and "1" are two labels."""
    if isinstance(label, str):
        kind = int if _WHOLE_NUMBER.fullmatch(label) else float if _FRACTION.fullmatch(label) else None
    else:
        kind = type(label)
    number = kind(label) if kind else math.nan
    return number if math.isfinite(number) else None
