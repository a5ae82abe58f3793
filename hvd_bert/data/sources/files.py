"""Data files -> texts and rows. Content that is not data gets a message that names it and the remedy."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from hvd_bert.data.sources.questions import Mistake
from hvd_bert.errors import UserError, as_user_error, reason_of
from hvd_bert.storage.reading import open_regular

Row = tuple[str, Any]  # its place, and its columns or the mistake in it
Choose = Callable[[list[str]], list[str]]  # the columns of a file -> those to read
_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"


@contextlib.contextmanager
def opened(path: str, name: str = "") -> Iterator[BinaryIO]:
    """Open a data file for reading; errors inside the block become a UserError. `name`: of the file, for messages."""
    name = name or path
    try:
        with open_regular(path) as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{name}: no such file (working directory: {os.getcwd()}). Check the path.") from error
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}. Give a readable data file.") from error


def parsed(name: str, content: bytes, choose: Choose = list) -> Iterator[Row] | str:
    """The rows of a Parquet file, or the text of another file; either may be gzipped. Raises UserError."""
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{name}: damaged gzip file ({reason_of(error)}). Copy or download it again.") from error
    if content.startswith(_PARQUET):
        return _parquet_rows(name, content, choose)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: neither UTF-8 text (byte {error.start}) nor Parquet, also in gzip. Decompress it, or save it as"
            " UTF-8."
        ) from error


# --- rows ----------------------------------------------------------------------------------------


def json_lines(name: str, text: str) -> Iterator[Row]:
    """The rows of JSON Lines."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)
                raise UserError(f"{name}: line {number}: not a JSON row: {reason}. Fix the file.") from error
            yield f"line {number}", row


def csv_rows(name: str, text: str, delimiter: str, choose: Choose = list, quotes: bool = True) -> Iterator[Row]:
    """The rows of CSV under the names in its first line. `quotes`: whether a text in quotes is one cell."""
    csv.field_size_limit(2**31 - 1)  # a long text is not an error
    rows = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        strict=True,
    )
    columns: list[str] = []
    try:
        for cells in filter(None, rows):
            if not columns:
                columns = cells
                repeated = [column for column in choose(columns) if columns.count(column) > 1]
                if repeated:
                    raise UserError(f"{name}: the first line names the column {repeated[0]} more than once. Rename it.")
            elif len(cells) == len(columns):
                yield f"line {rows.line_num}", dict(zip(columns, cells, strict=True))
            else:
                where = f"line {rows.line_num}"
                yield where, Mistake(f"{where} has {len(cells)} columns, the first line has {len(columns)}")
    except csv.Error as error:
        raise UserError(
            f"{name}: damaged CSV: {error} at line {rows.line_num}. Put texts with commas or line breaks in quotes."
        ) from error


def _parquet_rows(name: str, content: bytes, choose: Choose) -> Iterator[Row]:
    """The rows of a Parquet file."""
    from pyarrow import BufferReader
    from pyarrow.parquet import ParquetFile

    with as_user_error(lambda reason: f"{name}: damaged Parquet file: {reason}. Copy or download it again."):
        file = ParquetFile(BufferReader(content))
        batches = file.iter_batches(columns=choose(file.schema_arrow.names))
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"row {number}", row
