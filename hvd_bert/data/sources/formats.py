"""The formats of data files: SQuAD's JSON, JSON Lines (also MRQA's), CSV and Parquet.

The content decides, not the name. `read` yields one question at a time: `entries.py` converts each, `checks.py` checks
them.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Any

from hvd_bert.data.sources.entries import (
    Found,
    Mistake,
    attempt,
    found,
    get,
    mrqa_question,
    row_question,
    shown,
    squad_question,
)
from hvd_bert.data.sources.questions import Reading
from hvd_bert.data.sources.recognition import (
    check_expansion,
    check_not_python,
    decoded,
    expansion_limit,
    is_parquet,
    unpacked,
)
from hvd_bert.errors import UserError, as_user_error

_GIVE = "Give a file in the format of train-v1.1.json."
_COLUMN_FLAGS = "Name the columns with --question_column, --context_column and --answer_column."
_DELIMITERS = ",\t;"
_MAX_HEADER = 2**16
_JSON = re.compile(r"\s*[\[{]")
_ROWS_AT_ONCE = 1000
_MIN_ROW_BYTES = 100  # in Python, where it takes more; a row of JSON Lines takes about as much


def read(name: str, content: bytes, reading: Reading) -> Iterator[Found]:
    """Everything in a file. Raises UserError if it is not data at all; mistakes in parts of it are among the values."""
    limit = expansion_limit(len(content))
    content = unpacked(name, content)
    if is_parquet(content):
        rows = parquet_rows(name, content, limit, lambda present: check_columns(name, present, reading))
        return from_rows(rows, reading)
    text = decoded(name, content)
    header = _csv_header(text, reading)
    if header:
        return _from_csv(name, text, header, reading)
    return _from_json(name, _parsed(name, text), reading)


def _from_list(name: str, label: str, entries: list[Any], reading: Reading) -> Iterator[Found]:
    """Flat rows of JSON. Raises UserError if no row has one of the columns; a row that lacks it is a mistake."""
    flat = [row for row in entries if isinstance(row, dict) and "qas" not in row and row.keys() != {"header"}]
    if flat:
        check_columns(name, list(dict.fromkeys(key for row in flat for key in row)), reading)
    return from_rows(((f"{label}[{number}]", row) for number, row in enumerate(entries)), reading)


def from_rows(rows: Iterable[tuple[str, Any]], reading: Reading) -> Iterator[Found]:
    """Flat rows with their places. A row with "qas" is a paragraph, as in MRQA's files."""
    contexts: dict[str, str] = {}
    for where, row in rows:
        if isinstance(row, dict) and "qas" in row:
            yield from _from_paragraph(where, "", row, reading)
        elif not (isinstance(row, dict) and row.keys() == {"header"}):  # MRQA's first line
            yield found(row_question, where, row, reading, contexts)


def check_columns(name: str, present: list[str], reading: Reading) -> list[str]:
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
            return [row for _, row in json_lines(name, text)]
        check_not_python(name, text)
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


def json_lines(name: str, text: str) -> Iterator[tuple[int, Any]]:
    """The rows of JSON Lines, with the numbers of their lines from 1."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{name}: not JSON: {error.msg} at line {number}, column {error.colno} "
                    "(read as one JSON row per line). Fix the file."
                ) from error
            except (ValueError, RecursionError) as error:  # as in _parsed
                raise UserError(f"{name}: not data: {error} at line {number}. Fix the file.") from error
            yield number, row


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
        of_mrqa = isinstance(entry, dict) and not entry.keys().isdisjoint({"qid", "detected_answers"})
        convert = mrqa_question if of_mrqa else squad_question
        yield found(convert, f"{where}.qas[{number}]", title, context, entry, reading)


# --- tables --------------------------------------------------------------------------------------


def _csv_header(text: str, reading: Reading) -> tuple[str, list[str]] | None:
    """Delimiter and columns, if the first line names the context and the question."""
    if _JSON.match(text):
        return None
    line = re.split(r"[\r\n]", text[:_MAX_HEADER].lstrip(), maxsplit=1)[0]
    for delimiter in _DELIMITERS:
        with suppress(csv.Error):
            columns = next(csv.reader([line], delimiter=delimiter), [])
            if {reading.context_column, reading.question_column} <= set(columns):
                return delimiter, columns
    return None


def _from_csv(name: str, text: str, header: tuple[str, list[str]], reading: Reading) -> Iterator[Found]:
    from pyarrow import BufferReader, string
    from pyarrow import csv as arrow_csv

    delimiter, columns = header
    wanted = check_columns(name, columns, reading)
    repeated = [column for column in wanted if columns.count(column) > 1]
    if repeated:
        raise UserError(f"{name}: the first line names the column {repeated[0]} more than once. Rename one of them.")
    malformed: dict[int, str] = {}

    def note(row: Any) -> str:
        # Arrow counts the header and counts from 1.
        malformed[row.number - 2] = f"has {row.actual_columns} columns, the first line has {row.expected_columns}"
        return "skip"

    data = text.encode()
    with as_user_error(lambda reason: f"{name}: damaged CSV: {reason}. Quote texts with commas or line breaks."):
        table = arrow_csv.read_csv(
            BufferReader(data),
            # One block: a row may not cross blocks. One thread: only then rows have numbers.
            read_options=arrow_csv.ReadOptions(use_threads=False, block_size=min(len(data) + 1, 2**31 - 1)),
            parse_options=arrow_csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=note
            ),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=wanted, column_types=dict.fromkeys(columns, string()), strings_can_be_null=False
            ),
        )
        rows = _table_rows(table.to_batches(max_chunksize=_ROWS_AT_ONCE), malformed)
    yield from from_rows(rows, reading)
    for number, reason in malformed.items():
        yield Found(f"row {number}", mistake=Mistake("malformed row", f"row {number} {reason}"))


def parquet_rows(
    name: str, content: bytes, limit: int, choose: Callable[[list[str]], list[str]] = list
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a Parquet file, with their places. `choose`: which of the columns to read.

    Raises UserError if they are larger than `limit` bytes, as far as possible before they are read: millions of equal
    rows take a few bytes in the file.
    """
    from pyarrow import BufferReader
    from pyarrow.parquet import ParquetFile

    with as_user_error(lambda reason: f"{name}: damaged Parquet file: {reason}. Copy or download it again."):
        file = ParquetFile(BufferReader(content))
        columns = choose(file.schema_arrow.names)
        meta = file.metadata
        groups = sum(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
        check_expansion(name, max(groups, meta.num_rows * _MIN_ROW_BYTES), limit)
        at_once = max(1, min(_ROWS_AT_ONCE, limit // max(1, groups)))  # even if each row has the longest text
        yield from _table_rows(_limited(name, file.iter_batches(batch_size=at_once, columns=columns), limit))


def _limited(name: str, batches: Iterable[Any], limit: int) -> Iterator[Any]:
    """The batches, as long as they are not too large together: the file's sizes count each distinct text once."""
    size = 0
    for batch in batches:
        for column in batch.columns:
            size += (column.dictionary_decode() if hasattr(column, "dictionary_decode") else column).nbytes
        check_expansion(name, size, limit)
        yield batch


def _table_rows(batches: Iterable[Any], left_out: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """The rows with their numbers from 0. `left_out`: numbers of rows that are not in the batches."""
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            while number in left_out:
                number += 1
            yield f"row {number}", row
            number += 1
