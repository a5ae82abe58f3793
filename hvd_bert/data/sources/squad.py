"""Data files and hub data sets -> `Question`s, all of them checked.

A file is SQuAD's JSON, JSON Lines, CSV or Parquet: the content decides, not the name. Opening is fast:
the content is parsed and checked only when `Source.questions()` is called, on the rank that needs it.

Character offsets count Unicode code points from the start of the unstripped context: some of SQuAD's
contexts begin with a space, and their offsets count it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any

from hvd_bert.data.sources import files, hub
from hvd_bert.data.sources.checks import checked
from hvd_bert.data.sources.entries import attempt, found, get, row_question, shown, squad_question
from hvd_bert.data.sources.files import Row
from hvd_bert.data.sources.questions import BadExample, Found, Mistake, Question, Reading
from hvd_bert.errors import UserError

__all__ = ["Question", "Reading", "Source", "from_questions", "open_file", "open_hub"]

_PIECE_BYTES = 2**20
_DEFAULT = Reading()
_GIVE = "Give a file in the format of train-v1.1.json."
_COLUMN_FLAGS = "Name the columns with --question_column, --context_column and --answer_column."
_DELIMITERS = ",\t;"
_MAX_HEADER = 2**16
_JSON = re.compile(r"\s*[\[{]")


@dataclass
class Source:
    """A source of questions.

    `name` appears in messages (a path, or `squad[train]`). `digest` is the SHA-256 of the content and of
    the options that it is read with, so that equal digests mean equal questions.
    """

    name: str
    digest: str
    _load: Callable[[], tuple[list[Question], list[BadExample]]] = field(repr=False, compare=False)
    _bad: list[BadExample] | None = field(default=None, repr=False, compare=False)

    def questions(self) -> list[Question]:
        """All questions in the order of the file, parsed and checked.

        Each call parses again and keeps nothing: tokenization needs the questions once, training runs for hours.
        Raises `UserError` if the content is wrong.
        """
        questions, self._bad = self._load()
        return questions

    def bad_examples(self) -> list[BadExample]:
        """What has a mistake, with `--bad_examples skip`. Parses the source if nothing has done so yet."""
        if self._bad is None:
            self.questions()
        return self._bad or []


def open_file(path: str | os.PathLike[str], version_2_with_negative: bool, reading: Reading = _DEFAULT) -> Source:
    """Open a data file. Raises `UserError` if it cannot be read; `questions()` checks its content."""
    name = os.fspath(path)
    digest = _digest(name)

    def load() -> tuple[list[Question], list[BadExample]]:
        with files.opened(name) as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{name}: the file changed while it was being read. Run the command again.")
        return checked(name, _read(name, content, reading), version_2_with_negative, reading)

    return Source(name, reading.digest(digest, version_2_with_negative), load)


def open_hub(
    dataset_name: str,
    split: str,
    version_2_with_negative: bool,
    dataset_config_name: str | None = None,
    cache_dir: str | None = None,
    reading: Reading = _DEFAULT,
) -> Source:
    """Open a split of a data set with flat rows, from the Hugging Face hub or its local cache (`cache_dir`).

    Raises `UserError` if it is not available or has other columns.
    """
    name = f"{dataset_name}[{split}]"
    rows = hub.load(dataset_name, split, dataset_config_name, cache_dir)
    rows = rows.select_columns(_check_columns(name, rows.column_names, reading))

    def load() -> tuple[list[Question], list[BadExample]]:
        located = ((f"row {number}", row) for number, row in enumerate(rows))
        return checked(name, _from_rows(located, reading), version_2_with_negative, reading)

    return Source(name, reading.digest(hub.digest(rows), version_2_with_negative), load)


def from_questions(name: str, questions: Iterable[Question]) -> Source:
    """Questions in memory (from a test, or typed by a user), used without checks."""
    kept = list(questions)
    content = json.dumps([astuple(question) for question in kept]).encode()
    return Source(name, hashlib.sha256(content).hexdigest(), lambda: (kept, []))


def _digest(name: str) -> str:
    """SHA-256 of a file, read in pieces to save memory: every rank computes it at each start."""
    sha256 = hashlib.sha256()
    with files.opened(name) as file:
        while piece := file.read(_PIECE_BYTES):
            sha256.update(piece)
    return sha256.hexdigest()


# --- formats -------------------------------------------------------------------------------------


def _read(name: str, content: bytes, reading: Reading) -> Iterator[Found]:
    """Everything in a file. Raises UserError if it is not data at all; mistakes in parts of it are among the values."""

    def choose(present: list[str]) -> list[str]:
        return _check_columns(name, present, reading)

    found = files.parsed(name, content, choose)
    if not isinstance(found, str):
        return _from_rows(found, reading)
    delimiter = _csv_delimiter(found, reading)
    if delimiter:
        return _from_rows(files.csv_rows(name, found, delimiter, choose), reading)
    return _from_json(name, _parsed(name, found), reading)


def _from_list(name: str, label: str, entries: list[Any], reading: Reading) -> Iterator[Found]:
    """Flat rows of JSON. Raises UserError if no row has one of the columns; a row that lacks it is a mistake."""
    flat = [row for row in entries if isinstance(row, dict)]
    if flat:
        _check_columns(name, list(dict.fromkeys(key for row in flat for key in row)), reading)
    return _from_rows(((f"{label}[{number}]", row) for number, row in enumerate(entries)), reading)


def _from_rows(rows: Iterable[Row], reading: Reading) -> Iterator[Found]:
    """Flat rows with their places."""
    contexts: dict[str, str] = {}
    for where, row in rows:
        if isinstance(row, Mistake):
            yield Found(where, mistake=row)
        else:
            yield found(row_question, where, row, reading, contexts)


def _check_columns(name: str, present: list[str], reading: Reading) -> list[str]:
    """The columns to read. Raises UserError if one is missing."""
    missing = [column for column in reading.columns if column not in present]
    if missing:
        raise UserError(
            f"{name}: not in SQuAD's format: no column {', '.join(missing)} (found: {', '.join(present)})."
            f" {_COLUMN_FLAGS}"
        )
    wanted = ("id", "title", reading.context_column, reading.question_column, reading.answer_column, "answer_start")
    return [column for column in dict.fromkeys(wanted) if column in present]


# --- JSON ----------------------------------------------------------------------------------------


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and _JSON.match(text):  # a whole JSON value, then more: one row per line
            return [row for _, row in files.json_lines(name, text)]
        if not _JSON.match(text):
            raise UserError(
                f"{name}: neither JSON nor CSV with the columns of the questions ({shown(text.lstrip()[:100])})."
                f" {_COLUMN_FLAGS}"
            ) from error
        raise UserError(
            f"{name}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}. Fix the file."
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists inside thousands of lists
        raise UserError(f"{name}: not in SQuAD's format: {error}. {_GIVE}") from error


def _from_json(name: str, document: Any, reading: Reading) -> Iterator[Found]:
    if isinstance(document, dict) and reading.context_column in document:  # a single row
        document = [document]
    if isinstance(document, list):
        return _from_list(name, "", document, reading)
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise UserError(
            f'{name}: not in SQuAD\'s format: the file must be an object with a list under "data" '
            f"({shown(document)}). {_GIVE} If it is a row, name its columns: {_COLUMN_FLAGS}"
        )
    entries = document["data"]
    if any(isinstance(entry, dict) and "paragraphs" in entry for entry in entries):
        return _from_articles(entries, reading)
    return _from_list(name, "data", entries, reading)


def _from_articles(articles: list[Any], reading: Reading) -> Iterator[Found]:
    for article_number, article in enumerate(articles):
        at_article = f"data[{article_number}]"
        title = attempt(get, at_article, article, "title", str, "")
        paragraphs = title if isinstance(title, Mistake) else attempt(get, at_article, article, "paragraphs", list)
        if isinstance(paragraphs, Mistake):
            yield Found(at_article, mistake=paragraphs)
            continue
        for number, paragraph in enumerate(paragraphs):
            yield from _from_paragraph(f"{at_article}.paragraphs[{number}]", title, paragraph, reading)


def _from_paragraph(where: str, title: str, paragraph: Any, reading: Reading) -> Iterator[Found]:
    context = attempt(get, where, paragraph, "context", str)
    entries = context if isinstance(context, Mistake) else attempt(get, where, paragraph, "qas", list)
    if isinstance(entries, Mistake):
        yield Found(where, mistake=entries)
        return
    for number, entry in enumerate(entries):
        yield found(squad_question, f"{where}.qas[{number}]", title, context, entry, reading)


def _csv_delimiter(text: str, reading: Reading) -> str:
    """The delimiter, if the first line names the context and the question; else ""."""
    if _JSON.match(text):
        return ""
    line = re.split(r"[\r\n]", text[:_MAX_HEADER].lstrip(), maxsplit=1)[0]
    for delimiter in _DELIMITERS:
        with suppress(csv.Error):
            columns = next(csv.reader([line], delimiter=delimiter), [])
            if {reading.context_column, reading.question_column} <= set(columns):
                return delimiter
    return ""
