"""Labelled sentences and pairs of sentences, from JSON Lines, CSV or Parquet, with run_glue's choice of columns."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_bert.data.formats import json_lines, parquet_rows
from hvd_bert.data.recognition import decoded, is_parquet, unpacked
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import open_regular

LABEL = "label"
PAIR = ("sentence1", "sentence2")
NOT_TEXT = (LABEL, "id", "idx")
DELIMITERS = {".csv": ",", ".tsv": "\t"}  # by the ending of a file's name; others are JSON Lines or Parquet
Value = str | int
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python prints it: "01" and "1" are two labels


@dataclass(frozen=True)
class Texts:
    """Texts of a file with their labels. `second`: None for single sentences. `digest`: SHA-256 of the file."""

    name: str
    digest: str
    columns: list[str]
    first: list[str]
    second: list[str] | None
    labels: list[Value]

    def __len__(self) -> int:
        return len(self.first)

    def head(self, count: int | None) -> Texts:
        """The first `count` texts; None: all."""
        second = self.second and self.second[:count]
        return replace(self, first=self.first[:count], second=second, labels=self.labels[:count])


def read(path: str, flag: str, columns: list[str] | None = None) -> Texts:
    """All rows of a file that `flag` names. Raises UserError.

    `columns`: those of the texts; None: sentence1 and sentence2, else the first two columns besides label, id and idx.
    With one such column, the texts are single sentences.
    """
    content = _content(path, flag)
    located = list(_rows(path, content))
    if not located:
        raise UserError(f"{path}: there are no rows. Give a file with examples.")
    names = _text_columns(path, list(located[0][1]), columns)
    rows = [(*(_text(path, place, row, name) for name in names), _label(path, place, row)) for place, row in located]
    *texts, labels = (list(column) for column in zip(*rows, strict=True))
    digest = hashlib.sha256(content).hexdigest()
    return Texts(path, digest, names, texts[0], texts[1] if len(texts) > 1 else None, _as_numbers(path, labels))


def _text_columns(path: str, present: list[str], columns: list[str] | None) -> list[str]:
    names = columns or (PAIR if set(PAIR) <= set(present) else [name for name in present if name not in NOT_TEXT][:2])
    if names and {LABEL, *names} <= set(present):
        return list(names)
    of_training = " and ".join(f"`{name}`" for name in columns or ())
    texts = f"{of_training}, as in --train_file" if columns else "one or two with text"
    raise UserError(
        f"{path}: found the columns {', '.join(present)}, but needs a column `{LABEL}` and {texts}. Rename the columns."
    )


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


def _label(path: str, place: str, row: dict[str, Any]) -> Value:
    value = row.get(LABEL)
    if isinstance(value, float):
        raise UserError(f"{path}: {place}: the label {value} is a fraction; regression is not supported.")
    if isinstance(value, bool) or not isinstance(value, Value) or value == "":
        raise UserError(f"{path}: {place}: the label must be text or a whole number, not {value!r:.40}. Fix the file.")
    return _encodable(path, place, LABEL, value) if isinstance(value, str) else value


def _as_numbers(path: str, labels: list[Value]) -> list[Value]:
    """Numbers if all labels are (a CSV file has no types), so that 10 is sorted after 9."""
    if len({type(label) for label in labels}) > 1:
        raise UserError(f"{path}: some labels are text and some are numbers. Fix the file.")
    numbers = [label for label in labels if isinstance(label, int) or _WHOLE_NUMBER.fullmatch(label)]
    return [int(label) for label in labels] if len(numbers) == len(labels) else labels
