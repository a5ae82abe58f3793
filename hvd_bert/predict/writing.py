"""Writes a file of predictions in JSON Lines, CSV or Parquet. The file appears once it is complete."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyarrow.csv import CSVWriter
from pyarrow.parquet import ParquetWriter

from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.output.output_dir import check_apart
from hvd_bert.storage.writing import check_output, make_folder, replacing

Write = Callable[[pa.Table], object]


def check(flags: argparse.Namespace, world: World) -> None:
    """Create the folder of --output. Raises UserError if the file cannot be written or replaced. A collective."""
    with world.writing("--output", flags.output, EXIT_BAD_INPUT) as writes:
        if writes:
            check_apart("--output", flags.output, {"model_name_or_path": flags.model})
            make_folder(flags.output.parent)
            check_output(flags.output, flags.overwrite, [flags.input])


def check_columns(path: Path, schema: pa.Schema) -> None:
    """Raise UserError if `path` is JSON Lines or CSV and a column has bytes, which these formats cannot hold."""
    for field in schema if path.suffix != ".parquet" else ():
        if _has_bytes(field.type):
            raise UserError(
                f"--output {path}: column {field.name!r} has bytes. Name a .parquet file, or leave the column out."
            )


def check_new(flags: argparse.Namespace, taken: Sequence[str]) -> Sequence[str]:
    """Return `taken`, the columns of --input that have names of predictions, if these may replace them.

    Raises UserError without --overwrite_columns.
    """
    if taken and not flags.overwrite_columns:
        raise UserError(
            f"--input {flags.input}: predictions have the names of its columns {', '.join(map(repr, taken))}. Rename"
            " these columns, or replace them by --overwrite_columns."
        )
    return taken


def _has_bytes(kind: pa.DataType) -> bool:
    of_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    fields = (kind.field(number) for number in range(kind.num_fields))
    return of_bytes or pa.types.is_binary_view(kind) or any(_has_bytes(field.type) for field in fields)


@contextmanager
def reserved(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` after the block, unless the block raises. Raises OSError.

    If `path` is a symbolic link, its target is replaced. A file that another process creates at `path` in the
    meantime is replaced only with `overwrite`.
    """
    with replacing(path.resolve(), durable=True) as new:
        check_output(path, overwrite)  # another process may have created it since `check`
        yield new
        check_output(path, overwrite)


@contextmanager
def written(new: Path, suffix: str, schema: pa.Schema) -> Iterator[Write]:
    """Yield a function that appends tables to the file `new`, in the format that `suffix` names. Raises OSError."""
    if suffix == ".jsonl":
        file: Any = new.open("w", encoding="utf-8", newline="")  # closed below
        write: Write = partial(_write_lines, file)
    else:
        fields = [field.with_type(pa.string()) if _becomes_text(field.type, suffix) else field for field in schema]
        columns = pa.schema(fields, schema.metadata)
        file = ParquetWriter(new, columns) if suffix == ".parquet" else CSVWriter(new, columns)
        write = partial(_write_table, file, suffix)
    try:
        yield write
    except BaseException:
        with suppress(OSError):  # closing writes the buffer, which may fail again
            file.close()
        raise
    file.close()


def _write_lines(file: Any, table: pa.Table) -> None:
    """Write a table as JSON Lines. Columns of the type json follow as they are."""
    names = [field.name for field in table.schema if isinstance(field.type, pa.JsonType)]
    texts = [[f", {as_json(name)}: {text or 'null'}" for text in table[name].to_pylist()] for name in names]
    for number, row in enumerate(table.drop_columns(names).to_pylist()):
        file.write(f"{as_json(row)[:-1]}{''.join(column[number] for column in texts)}}}\n")


def _write_table(writer: CSVWriter | ParquetWriter, suffix: str, table: pa.Table) -> None:
    """Write a table as CSV or Parquet. Values that the format lacks become texts, lists and structures as JSON."""
    for number, field in enumerate(table.schema):
        if _becomes_text(field.type, suffix):
            cells = map(as_cell, table.column(number).to_pylist())
            table = table.set_column(number, field.with_type(pa.string()), pa.array(cells, pa.string()))
    writer.write_table(table)


def _becomes_text(kind: pa.DataType, suffix: str) -> bool:
    if suffix == ".parquet":
        return "struct<>" in str(kind)
    return pa.types.is_nested(kind) or pa.types.is_string_view(kind) or isinstance(kind, pa.BaseExtensionType)


def as_cell(value: Any) -> str | None:
    """Format a value as a text: texts as they are, None as None, others as JSON."""
    return None if value is None else escaped(str(value)) if isinstance(value, str | UUID) else as_json(value)


def as_json(value: Any) -> str:
    """Format a value as JSON, with dates, times and decimals as texts."""

    def as_text(other: Any) -> str:
        return other.isoformat() if hasattr(other, "isoformat") else str(other)

    return escaped(json.dumps(value, ensure_ascii=False, default=as_text))


def escaped(text: str) -> str:
    """Escape unpaired surrogates, which UTF-8 cannot hold, as JSON does."""
    return text.encode(errors="backslashreplace").decode()
