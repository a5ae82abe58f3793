"""Labelled sentences and pairs of sentences, from files or the hub, with run_glue's choice of columns."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.data.sources import files, hub
from hvd_bert.data.sources.checks import refuse_mistakes
from hvd_bert.data.sources.entries import attempt, get
from hvd_bert.data.sources.files import Row
from hvd_bert.data.sources.questions import BadExample, Mistake, Reading
from hvd_bert.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

PAIR = ("sentence1", "sentence2")
NOT_TEXT = ("id", "idx")
DELIMITERS = {".csv": ",", ".tsv": "\t"}  # by the ending of a file's name; others are JSON Lines or Parquet
Value = str | int | float
_DEFAULT = Reading()
_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python prints it: "01" and "1" are two labels
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# What programs write for a missing value, as pandas reads them, and what is not finite. 1e400 is not finite, either.
_NO_NUMBER = re.compile(r"<?#?(n/?a)>?|null|none|[+-]?(1\.#)?(nan|inf|infinity|ind|qnan)", re.IGNORECASE)


@dataclass(frozen=True)
class Columns:
    """Columns to read. `texts`: one, or two for pairs, or any number that `delimiter` joins into one text.

    Without `texts` they are sentence1 and sentence2, else the first two columns besides `label`, id and idx. With one
    such column, the texts are single sentences. `numbers`: all labels must be numbers, for a regression.
    """

    texts: tuple[str, ...] = ()
    label: str = "label"
    delimiter: str | None = None
    numbers: bool = False

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
        places: Where each text is, for messages.
        classes: Names of the classes in the data set's order, if it has a list of them.
        bad: Rows with mistakes, which are left out.
    """

    name: str
    digest: str
    columns: Columns
    first: list[str]
    second: list[str] | None
    labels: list[Value]
    places: list[str]
    classes: list[str] | None = None
    bad: list[BadExample] = field(default_factory=list)

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


def open_file(path: str, flag: str, columns: Columns = Columns(), reading: Reading = _DEFAULT) -> Texts:
    """All rows of a file that `flag` names. Raises UserError."""
    with files.opened(path, f"{flag} {path}") as file:
        content = file.read()
    located = list(_rows(path, content))
    first = next((row for _, row in located if isinstance(row, dict)), None)
    if first is not None:
        columns = columns.found_in(path, list(first))
    elif not located:
        raise UserError(f"{path}: there are no rows. Give a file with examples.")
    return _texts(path, hashlib.sha256(content).hexdigest(), columns, located, reading)


def open_hub(rows: Dataset, name: str, columns: Columns = Columns(), reading: Reading = _DEFAULT) -> Texts:
    """All rows of a split of a data set on the hub. Raises UserError."""
    if not len(rows):
        raise UserError(f"{name}: there are no rows. Name another split.")
    columns = columns.found_in(name, rows.column_names)
    rows = rows.select_columns([*columns.texts, columns.label])
    located = ((f"row {number}", row) for number, row in enumerate(rows.to_list()))
    classes = getattr(rows.features[columns.label], "names", None)
    return _texts(name, hub.digest(rows), columns, located, reading, classes)


def _texts(
    name: str,
    digest: str,
    columns: Columns,
    located: Iterable[Row],
    reading: Reading,
    classes: list[str] | None = None,
) -> Texts:
    checked: list[tuple[str, tuple[list[str], Value] | Mistake]] = [
        (place, row if isinstance(row, Mistake) else attempt(_checked, name, place, row, columns, classes))
        for place, row in located
    ]
    found: list[Value] = [row[1] for _, row in checked if not isinstance(row, Mistake)]
    labels = iter(found if classes is not None else _as_numbers(found, columns.numbers))
    kept, bad = [], []
    for place, row in checked:
        texts, label = ([], row) if isinstance(row, Mistake) else (row[0], next(labels))
        if isinstance(label, Mistake):
            bad.append(BadExample(place, None, label.kind, label.reason, True))
        else:
            kept.append((place, label, *texts))
    refuse_mistakes(name, bad, len(kept), reading, "texts")
    places, values, *parts = (list(column) for column in zip(*kept, strict=True))
    if columns.delimiter is not None:
        parts = [[columns.delimiter.join(pieces) for pieces in zip(*parts, strict=True)]]
    second = parts[1] if len(parts) > 1 else None
    return Texts(name, digest, columns, parts[0], second, values, places, classes, bad)


def _rows(path: str, content: bytes) -> Iterator[Row]:
    """The rows with their places."""
    found = files.parsed(path, content)
    if not isinstance(found, str):
        return found
    delimiter = DELIMITERS.get(Path(path.lower().removesuffix(".gz")).suffix)
    if delimiter:  # files with tabs, such as GLUE's, do not quote: a single " is a part of the text
        return files.csv_rows(path, found, delimiter, quotes=delimiter != "\t")
    if not found.lstrip().startswith(("{", "[")):
        raise UserError(f"{path}: not JSON Lines. Give one JSON object per line, or a file that ends in .csv or .tsv.")
    no_object = Mistake("malformed row", "it is not a JSON object")
    rows = files.json_lines(path, found)
    return ((place, row if isinstance(row, dict) else no_object) for place, row in rows)


def _checked(
    name: str, place: str, row: dict[str, Any], columns: Columns, classes: list[str] | None
) -> tuple[list[str], Value]:
    """The texts and the label of a row. Raises Mistake."""
    texts = [_encodable(column, get(place, row, column, str)) for column in columns.texts]
    return texts, _label(name, place, row, columns.label, classes)


def _encodable(name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Mistake("invalid character", f"`{name}` contains an unpaired surrogate") from None
    return value


def _label(name: str, place: str, row: dict[str, Any], column: str, classes: list[str] | None) -> Value:
    value: Any = row.get(column)
    if classes is not None and isinstance(value, int):
        if not 0 <= value < len(classes):  # -1 in the test sets of GLUE
            raise UserError(f"{name}: {place} has no label ({value}). Name a split with labels.")
        return classes[value]
    fraction = isinstance(value, float) and math.isfinite(value)
    if isinstance(value, bool) or not (isinstance(value, (str, int)) or fraction) or value == "":
        raise Mistake("wrong label", f"the label must be text or a number, not {value!r:.40}")
    label: Value = _encodable(column, value) if isinstance(value, str) else value
    return label


def _as_numbers(labels: list[Value], must_be: bool) -> list[Value | Mistake]:
    """Numbers if the labels are (a CSV file has no types): whole ones, so that 10 is sorted after 9, or fractions.

    They are if all others are marks of missing values or not finite, or if most are numbers and some are fractions. A
    label that is not a finite number is then a mistake, and always one that is not of the type that most have.
    """
    as_text = 2 * sum(isinstance(label, str) for label in labels) >= len(labels)
    alike = [label for label in labels if isinstance(label, str) == as_text]
    numbers = [label for label in alike if is_finite(label)]
    fractions = any(isinstance(label, float) or {*".eE"} & {*str(label)} for label in numbers)
    whole = all(isinstance(label, int) or _WHOLE_NUMBER.fullmatch(str(label)) for label in numbers)
    are_numbers = must_be or (numbers and all(is_finite(label) or _is_no_number(label) for label in alike))
    if not are_numbers and not (fractions and 2 * len(numbers) > len(alike)):
        return [label if isinstance(label, str) == as_text else _wrong(label, "text, as most are") for label in labels]
    convert: Callable[[Value], Value] = int if whole else float if fractions or must_be else lambda label: label
    needed = "a finite number, " + ("which a regression needs" if must_be else "as most are")
    return [
        convert(label) if is_finite(label) and isinstance(label, str) == as_text else _wrong(label, needed)
        for label in labels
    ]


def _wrong(label: Value, needed: str) -> Mistake:
    return Mistake("wrong label", f"the label {label!r:.40} is not {needed}")


def is_finite(label: Value) -> bool:
    """Whether it is a finite number, or text of one."""
    try:
        return math.isfinite(float(label)) and (not isinstance(label, str) or bool(_NUMBER.fullmatch(label)))
    except (ValueError, OverflowError):
        return False


def _is_no_number(label: Value) -> bool:
    """Whether it stands for a missing value, or for a number that is not finite."""
    written = str(label).strip()
    return not written or bool(_NO_NUMBER.fullmatch(written) or _NUMBER.fullmatch(written))
