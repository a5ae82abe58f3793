"""Labelled sentences and pairs of sentences, from files or the hub, with run_glue's choice of columns."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.data import hub
from hvd_bert.data.formats import json_lines, parquet_rows
from hvd_bert.data.recognition import decoded, is_parquet, unpacked
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import open_regular

if TYPE_CHECKING:
    from datasets import Dataset

PAIR = ("sentence1", "sentence2")
NOT_TEXT = ("id", "idx")
DELIMITERS = {".csv": ",", ".tsv": "\t"}  # by the ending of a file's name; others are JSON Lines or Parquet
Value = str | int | float
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python prints it: "01" and "1" are two labels
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclass(frozen=True)
class Columns:
    """Columns to read. `texts`: one, or two for pairs, or any number that `delimiter` joins into one text.

    Without `texts` they are sentence1 and sentence2, else the first two columns besides `label`, id and idx. With one
    such column, the texts are single sentences.
    """

    texts: tuple[str, ...] = ()
    label: str = "label"
    delimiter: str | None = None

    def __post_init__(self) -> None:
        names = ",".join(self.texts)
        if "" in self.texts or len({*self.texts, self.label}) <= len(self.texts):
            raise UserError(f"--text_column_names {names}: give different names, other than {self.label}.")
        if len(self.texts) > 2 and self.delimiter is None:
            raise UserError(
                f"--text_column_names {names}: give one column or two. To join more, add --text_column_delimiter."
            )

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
        classes: Names of the classes in the data set's order, if it has a list of them.
    """

    name: str
    digest: str
    columns: Columns
    first: list[str]
    second: list[str] | None
    labels: list[Value]
    classes: list[str] | None = None

    def __len__(self) -> int:
        return len(self.first)

    def head(self, count: int | None) -> Texts:
        """The first `count` texts; None: all."""
        second = self.second and self.second[:count]
        return replace(self, first=self.first[:count], second=second, labels=self.labels[:count])


def open_file(path: str, flag: str, columns: Columns = Columns()) -> Texts:
    """All rows of a file that `flag` names. Raises UserError."""
    content = _content(path, flag)
    located = list(_rows(path, content))
    if not located:
        raise UserError(f"{path}: there are no rows. Give a file with examples.")
    columns = columns.found_in(path, list(located[0][1]))
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


def _texts(
    name: str,
    digest: str,
    columns: Columns,
    located: Iterable[tuple[str, dict[str, Any]]],
    classes: list[str] | None = None,
) -> Texts:
    rows = [
        (*(_text(name, place, row, column) for column in columns.texts), _label(name, place, row, columns, classes))
        for place, row in located
    ]
    *texts, labels = (list(column) for column in zip(*rows, strict=True))
    if columns.delimiter is not None:
        texts = [[columns.delimiter.join(parts) for parts in zip(*texts, strict=True)]]
    second = texts[1] if len(texts) > 1 else None
    return Texts(name, digest, columns, texts[0], second, _as_numbers(name, labels), classes)


def _content(path: str, flag: str) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read: {error.strerror or error}.") from None


def _rows(path: str, content: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows with their places."""
    content = unpacked(path, content)
    if is_parquet(content):
        return parquet_rows(path, content)
    text = decoded(path, content)
    ending = Path(path.lower().removesuffix(".gz")).suffix
    if ending in DELIMITERS:
        return _csv(path, text, DELIMITERS[ending])
    if not text.lstrip().startswith(("{", "[")):
        raise UserError(f"{path}: not JSON Lines. Give one JSON object per line, or a file that ends in .csv or .tsv.")
    return _json_lines(path, text)


def _csv(path: str, text: str, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)  # a long text is not an error
    # Files with tabs, such as GLUE's, do not quote: a single " is a part of the text.
    reader = csv.DictReader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL,
    )
    try:
        names = list(reader.fieldnames or ())
    except csv.Error as error:  # under Python 3.10 a NUL byte; later versions read it
        raise UserError(f"{path}: the first line cannot be read as CSV ({error}). Fix the file.") from None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the first line names the column `{twice}` more than once. Fix the file.")
    for row in reader:
        place = f"line {reader.line_num}"
        if None in row or None in row.values():
            raise UserError(f"{path}: {place} has another number of columns than the first line. Fix the file.")
        yield place, row


def _json_lines(path: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in json_lines(path, text):
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object. Give one JSON object per line.")
        yield f"line {number}", row


def _text(path: str, place: str, row: dict[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise UserError(f"{path}: {place}: `{name}` must be text, not {str(value)[:40]}. Fix the file.")
    return _encodable(path, place, name, value)


def _encodable(path: str, place: str, name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: {place}: `{name}` contains an unpaired surrogate. Fix the file.") from None
    return value


def _label(name: str, place: str, row: dict[str, Any], columns: Columns, classes: list[str] | None) -> Value:
    value: Any = row.get(columns.label)
    if classes is not None and isinstance(value, int):
        if not 0 <= value < len(classes):  # -1 in the test sets of GLUE
            raise UserError(f"{name}: {place} has no label ({value}). Name a split with labels.")
        return classes[value]
    fraction = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, bool) or not (isinstance(value, (str, int)) or fraction) or value == "":
        raise UserError(f"{name}: {place}: the label must be text or a number, not {value!r:.40}. Fix the data.")
    label: Value = _encodable(name, place, columns.label, value) if isinstance(value, str) else value
    return label


def _as_numbers(name: str, labels: list[Value]) -> list[Value]:
    """Numbers if all labels are (a CSV file has no types): whole ones, so that 10 is sorted after 9, or fractions."""
    if len({isinstance(label, str) for label in labels}) > 1:
        raise UserError(f"{name}: some labels are text and some are numbers. Fix the data.")
    if all(isinstance(label, int) or _WHOLE_NUMBER.fullmatch(str(label)) for label in labels):
        return [int(label) for label in labels]
    written = [str(label) for label in labels]
    fractions = any(isinstance(label, float) for label in labels) or (
        all(_NUMBER.fullmatch(label) and math.isfinite(float(label)) for label in written)
        and any({*".eE"} & {*label} for label in written)
    )
    return [float(label) for label in labels] if fractions else labels
