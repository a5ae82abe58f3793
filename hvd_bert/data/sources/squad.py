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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Any

from hvd_bert.data.sources import files, hub
from hvd_bert.data.sources.entries import attempt, get, row_question, shown, squad_question
from hvd_bert.data.sources.files import Row
from hvd_bert.data.sources.questions import SHORT, Mistake, Question, Reading, checked
from hvd_bert.errors import UserError

__all__ = ["Question", "Reading", "Source", "from_questions", "open_file", "open_hub"]

Found = tuple[str, Question | Mistake]  # a place of the data, and what is there
_PIECE_BYTES = 2**20
_DEFAULT = Reading()
_GIVE = "Give a file in the format of train-v1.1.json."
_COLUMN_FLAGS = "Name the columns with --question_column, --context_column and --answer_column."
_DELIMITERS = ",\t;"
_MAX_HEADER = 2**16
_JSON = re.compile(r"\s*[\[{]")


@dataclass(frozen=True)
class Source:
    """A source of questions.

    `name` appears in messages (a path, or `squad[train]`). `digest` is the SHA-256 of the content and of
    the options that it is read with, so that equal digests mean equal questions.
    `questions` returns all questions in the order of the file, parsed and checked. Each call parses again and keeps
    nothing: tokenization needs the questions once, training runs for hours. It raises `UserError` if the content is
    wrong.
    """

    name: str
    digest: str
    questions: Callable[[], list[Question]] = field(repr=False, compare=False)


def open_file(path: str | os.PathLike[str], version_2_with_negative: bool, reading: Reading = _DEFAULT) -> Source:
    """Open a data file. Raises `UserError` if it cannot be read; `questions()` checks its content."""
    name = os.fspath(path)
    digest = _digest(name)

    def load() -> list[Question]:
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

    def load() -> list[Question]:
        located = ((f"row {number}", row) for number, row in enumerate(rows))
        return checked(name, _from_rows(located, reading), version_2_with_negative, reading)

    return Source(name, reading.digest(hub.digest(rows), version_2_with_negative), load)


def from_questions(name: str, questions: Iterable[Question]) -> Source:
    """Questions in memory (from a test, or typed by a user), used without checks."""
    kept = list(questions)
    content = json.dumps([astuple(question) for question in kept]).encode()
    return Source(name, hashlib.sha256(content).hexdigest(), lambda: kept)


def joined(sources: Sequence[Source], limit: int | None = None) -> Source:
    """The first `limit` questions of each source, as one source; a single source as it is."""
    if len(sources) == 1:
        return sources[0]
    digest = hashlib.sha256(" ".join(source.digest for source in sources).encode()).hexdigest()
    name = ", ".join(source.name for source in sources)
    return Source(name, digest, lambda: [question for source in sources for question in source.questions()[:limit]])


def check_ids(sources: Sequence[Source], questions: Sequence[Sequence[Question]]) -> None:
    """Raise UserError if questions of two sources have the same id: predictions are by id."""
    first: dict[str, str] = {}
    for source, some in zip(sources, questions, strict=True):
        other = next((q for q in some if first.setdefault(q.id, source.name) != source.name), None)
        if other:
            raise UserError(f"{first[other.id]} and {source.name} share the id {SHORT.repr(other.id)}. Change one.")


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
        yield where, row if isinstance(row, Mistake) else attempt(row_question, where, row, reading, contexts)


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
    except (ValueError, RecursionError) as error:
        if not _JSON.match(text):
            raise UserError(
                f"{name}: neither JSON nor CSV with the columns of the questions ({shown(text.lstrip()[:100])})."
                f" {_COLUMN_FLAGS}"
            ) from error
        if getattr(error, "msg", "") == "Extra data":  # a whole JSON value, then more: one row per line
            return [row for _, row in files.json_lines(name, text)]
        raise UserError(f"{name}: not JSON: {error}. Fix the file.") from error


def _from_json(name: str, document: Any, reading: Reading) -> Iterator[Found]:
    if isinstance(document, dict) and reading.context_column in document:  # a single row
        document = [document]
    if isinstance(document, list):
        return _from_list(name, "", document, reading)
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise UserError(
            f'{name}: not in SQuAD\'s format: the file must be an object with a list under "data" '
            f"({shown(document)}). {_GIVE} If it is a row: {_COLUMN_FLAGS}"
        )
    entries = document["data"]
    if any(isinstance(entry, dict) and "paragraphs" in entry for entry in entries):
        return _from_articles(entries, reading)
    return _from_list(name, "data", entries, reading)


def _from_articles(articles: list[Any], reading: Reading) -> Iterator[Found]:
    for number, article in enumerate(articles):
        where = f"data[{number}]"
        try:
            title = get(where, article, "title", str, "")
            for n, paragraph in enumerate(get(where, article, "paragraphs", list)):
                inside = f"{where}.paragraphs[{n}]"
                context = get(inside, paragraph, "context", str)
                for m, entry in enumerate(get(inside, paragraph, "qas", list)):
                    at_entry = f"{inside}.qas[{m}]"
                    yield at_entry, attempt(squad_question, at_entry, title, context, entry, reading)
        except Mistake as mistake:  # in the structure around the questions
            yield where, mistake


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
