"""Parses data files into objects with their paths. For unreadable content, the error names its likely format.

The readers of `datasets` are not used: they convert texts that look like numbers or dates, misplace the cells of CSV
rows that are longer than the header, and do not report line numbers.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import gzip
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hvd_bert.data.sources.entries import LEVELS, WHOLE
from hvd_bert.data.sources.questions import Mistake
from hvd_bert.errors import UserError, as_user_error
from hvd_bert.storage.reading import GIB, open_regular

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Located = tuple[str, Any]  # (path in the file, object or mistake at that path)
Choose = Callable[[list[str]], list[str]]  # all columns of a file -> the columns to read; raises UserError
_GZIP, PARQUET, _ARROW = b"\x1f\x8b", b"PAR1", b"\xff\xff\xff\xff"
_JSON = re.compile(r"\s*[\[{]")
_DELIMITERS = ",\t;"
_MAX_HEADER = 2**16
MAX_RATIO = 100  # maximum ratio of unpacked to packed size above 1 GiB; gzip itself reaches 1,032


@contextlib.contextmanager
def opened(path: str, name: str = "") -> Iterator[BinaryIO]:
    """Open a data file. OSError inside the block becomes UserError. `name`: the file's name in messages."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        reason = str(error.strerror or error).lower()
        message = f"{name or path}: {reason} (working directory: {os.getcwd()}). {_remedy(path)}"
        raise UserError(message) from error


def _remedy(path: str) -> str:
    """Return what to give in place of a path that is no readable file."""
    if glob.glob(path) and not os.path.lexists(path):
        return "Give one file: join files of JSON Lines."
    folder, saved = glob.escape(path), f'datasets.load_from_disk("{path}")'
    names = [os.path.basename(file) for file in sorted(glob.glob(os.path.join(folder, "*"))) if os.path.isfile(file)]
    if not names:  # also of a folder that cannot be read
        return "Give a readable data file."
    if "state.json" in names:  # of `save_to_disk`
        return f'Convert it by {saved}.to_json("train.jsonl"), and name this file.'
    if "dataset_dict.json" in names:
        each = f'for name, split in {saved}.items(): split.to_json(f"{{name}}.jsonl")'
        return f"Convert its splits by `{each}`, and name a file."
    ((suffix, _),) = Counter(Path(name).suffix for name in names).most_common(1)
    pattern = os.path.join(folder, f"*{suffix}")
    return f"Name a file in it. --train_file and --validation_file also take a pattern, such as '{pattern}'."


def is_index(column: str) -> bool:
    """Return whether a column's name is one that pandas writes for an unnamed index."""
    return column in ("", "__index_level_0__") or column.startswith("Unnamed: ")


def unpacked(name: str, content: bytes) -> bytes:
    """Decompress the content if it is gzipped. Raises UserError if it is damaged or too large."""
    if not content.startswith(_GZIP):
        return content
    with as_user_error(lambda reason: f"{name}: damaged gzip file ({reason}). Copy or download it again."):
        limit = max(GIB, MAX_RATIO * len(content))
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{name}: larger than {limit // GIB} GiB without gzip. Decompress it if this is right.")
    return content


def parsed(name: str, content: bytes, choose: Choose, tsv: bool = False, whole_ids: bool = False) -> Iterable[Located]:
    """Parse the rows of CSV or Parquet, the lines of JSON Lines, or the single value of JSON. Raises UserError.

    `tsv`: text rows have cells separated by tabs, and quotes are ordinary characters. `whole_ids`: CSV's ids 7.0 become
    7 if all ids are such numbers.
    """
    if content.startswith(PARQUET):
        return _parquet_rows(name, content, choose)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        likely = "compressed, an Excel workbook or in another encoding"
        with contextlib.suppress(UnicodeDecodeError):
            if b"\0" not in content and content.decode("cp1252"):
                likely = "in Windows-1252 (cp1252) or another encoding in which Excel saves CSV"
        if content.startswith((_ARROW, b"ARROW1")):
            likely = 'Arrow, which datasets.Dataset.from_file(FILE).to_json("train.jsonl") converts'
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            likely = "in UTF-16"
        raise UserError(
            f"{name}: not UTF-8 text (byte {error.start}), but probably {likely}. Decompress it, or save it as UTF-8"
            ' (in Excel: "CSV UTF-8").'
        ) from error
    if _JSON.match(text):
        return _json_values(name, text, choose)
    rows = _csv_rows(name, text, choose, tsv)
    return _with_whole_ids([*rows]) if whole_ids else rows


def _json_values(name: str, text: str, choose: Choose) -> list[Located]:
    """Parse JSON or JSON Lines. `choose` checks the columns of flat rows."""
    try:
        values = [("", json.loads(text))]
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") != "Extra data":  # JSON Lines has further values after the first
            raise UserError(f"{name}: not JSON: {error}. Fix the file.") from error
        values = list(_json_lines(name, text))
    rows = values[0][1] if isinstance(values[0][1], list) else [value for _, value in values]
    rows = rows[0]["data"] if len(rows) == 1 and isinstance(rows[0], dict) and "data" in rows[0] else rows
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if rows and not any(map(_is_nested, rows)):
        choose(list(dict.fromkeys(key for row in rows for key in row)))
    return values


def _is_nested(row: Mapping[str, Any]) -> bool:
    """Return whether an object is nested: it has a SQuAD level, or it contains an object other than an answer."""
    items = (item for value in row.values() for item in (value if isinstance(value, list) else [value]))
    return bool(set(LEVELS) & set(row)) or any(isinstance(item, dict) and "text" not in item for item in items)


def _json_lines(name: str, text: str) -> Iterator[Located]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", error)
                raise UserError(f"{name}: line {number}: not JSON: {reason}. Fix the file.") from error


def _csv_rows(name: str, text: str, choose: Choose, tsv: bool) -> Iterator[Located]:
    """Parse CSV with column names in the first line.

    A cell such as `"a" b` is an error. pandas and pyarrow read it as `a b`, which would shift character offsets.
    """
    csv.field_size_limit(2**31 - 1)  # by default, texts over 128 KiB are errors
    text = text.lstrip("\r\n")
    header = re.split(r"[\r\n]", text[:_MAX_HEADER], maxsplit=1)[0]
    delimiter = "\t" if tsv else max(_DELIMITERS, key=header.count)
    rows = csv.DictReader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if tsv else csv.QUOTE_MINIMAL,
        strict=True,
    )  # extra cells are stored under the key None; missing cells are None
    try:
        if rows.fieldnames:
            choose(list(rows.fieldnames))
        for row in rows:
            where = f"line {rows.line_num}"
            complete = None not in row and None not in row.values()
            yield where, row if complete else Mistake("wrong structure", "not as many cells as the first line", where)
    except csv.Error as error:
        where = f"line {rows.reader.line_num}"
        raise UserError(
            f"{name}: {where}: damaged CSV: {error}. Put texts with commas or line breaks in quotes."
        ) from error


def _with_whole_ids(rows: list[Located]) -> list[Located]:
    """Restore the ids of CSV's rows if pandas wrote all of them as 7.0, since one is missing."""
    cells = [row for _, row in rows if isinstance(row, dict)]
    if all(WHOLE.fullmatch(row.get("id", "none") or "0.0") for row in cells):
        for row in cells:
            row["id"] = row["id"].removesuffix(".0")
    return rows


@contextlib.contextmanager
def parquet_file(name: str, content: bytes) -> Iterator[ParquetFile]:
    """Open Parquet content. Errors inside the block become UserError."""
    from pyarrow import BufferReader
    from pyarrow.parquet import ParquetFile

    with as_user_error(lambda reason: f"{name}: damaged Parquet file: {reason}. Copy or download it again."):
        yield ParquetFile(BufferReader(content))


def _parquet_rows(name: str, content: bytes, choose: Choose) -> Iterator[Located]:
    with parquet_file(name, content) as file:
        batches = file.iter_batches(columns=choose(file.schema_arrow.names))
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield f"row {number}", row
