"""A file of predictions: JSON Lines, CSV or Parquet, which appears once it is complete."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.csv import CSVWriter
from pyarrow.parquet import ParquetWriter

from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT
from hvd_bert.storage.writing import check_output, make_folder, replacing

Write = Callable[[pa.Table], object]


def check(path: Path, overwrite: bool, world: World) -> None:
    """Create the folder of --output, and refuse a file that cannot be written or replaced. A collective."""
    with world.writing("--output", path, EXIT_BAD_INPUT) as writes:
        if writes:
            make_folder(path.parent)
            check_output(path, overwrite)


@contextmanager
def appearing(path: Path, schema: pa.Schema) -> Iterator[Write]:
    """Writes tables to a file that replaces `path`, or its target, unless the block raises. Raises OSError."""
    with replacing(path.resolve(), durable=True) as new:
        if path.suffix == ".jsonl":
            file: Any = new.open("w", encoding="utf-8", newline="")  # closed below
            write: Write = partial(_write_lines, file)
        elif path.suffix == ".parquet":
            file = ParquetWriter(new, schema)
            write = file.write_table
        else:
            file = CSVWriter(new, pa.schema([(field.name, _flat(field.type)) for field in schema]))
            write = partial(_write_csv, file)
        try:
            yield write
        except BaseException:
            with suppress(OSError):  # closing may fail on what is still buffered
                file.close()
            raise
        file.close()


def _write_lines(file: Any, table: pa.Table) -> None:
    file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in table.to_pylist())


def _flat(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_nested(kind) else kind


def _write_csv(writer: CSVWriter, table: pa.Table) -> None:
    """Write rows whose lists and structures become JSON."""
    for number, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            texts = [json.dumps(value, ensure_ascii=False) for value in table.column(number).to_pylist()]
            table = table.set_column(number, field.name, pa.array(texts))
    writer.write_table(table)
