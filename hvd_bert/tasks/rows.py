"""Reads rows of data files and hub data sets into a `datasets.Dataset`, for custom tasks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvd_bert import hub
from hvd_bert.config.settings import Config
from hvd_bert.data.sources import files
from hvd_bert.data.sources.entries import as_text, shown
from hvd_bert.data.sources.questions import Mistake
from hvd_bert.errors import UserError, as_user_error, short_reason

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


def load_rows(config: Config, name: Literal["train", "validation"], split: str | None = None) -> Dataset | None:
    """Load the rows of --train_file or --validation_file, or of --dataset_name's `split` (default: `name`).

    Returns None if the run does not need the rows, or has no validation data. Leaves out pandas' index columns, and
    validation rows beyond --max_eval_samples. Raises UserError.
    """
    from datasets import Split, concatenate_datasets

    data, args = config.data, config.train
    if not (args.do_train if name == "train" else args.do_eval):
        return None
    flag, found = f"--{name}_file", data.files(f"{name}_file")
    if data.dataset_name:
        rows = hub.load_split(data.dataset_name, split or name, data.dataset_config_name, config.model.cache_dir)
    elif found:
        if any(file.weight != 1 for file in found):
            raise UserError(f"{flag}: --task {data.task} does not support weights. Remove them.")
        with as_user_error(lambda reason: f"{flag}: the files differ ({reason}). Give files of one format."):
            rows = concatenate_datasets([read_rows(file.path, flag) for file in found], split=Split(name))
    elif name == "train":
        raise UserError("--train_file is missing: give a file of rows, or evaluate a trained model by --no_do_train.")
    else:
        return None
    rows = rows.remove_columns([*filter(files.is_index, rows.column_names)])
    limit = data.max_eval_samples if name == "validation" else None
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def read_rows(path: str, flag: str) -> Dataset:
    """Read the rows of the file that `flag` names. Values have their types in Parquet or JSON; CSV cells are texts.

    Raises UserError if the file cannot be read or has no rows.
    """
    import datasets
    import pyarrow as pa

    name, split = f"{flag} {path}", datasets.NamedSplit(flag.removeprefix("--").removesuffix("_file"))
    with files.opened(path, name) as file:
        content = files.unpacked(name, file.read())
    datasets.disable_progress_bars()  # otherwise each rank would show one for a task's `rows.map`
    choose = partial(check_names, name)
    if content.startswith(files.PARQUET):
        with files.parquet_file(name, content) as parquet:
            table = parquet.read(choose(parquet.schema_arrow.names))
    else:
        as_glue = Path(path.lower().removesuffix(".gz")).suffix == ".tsv"  # GLUE's .tsv texts have unpaired quotes
        columns: dict[str, list[Any]] = {}
        for count, row in enumerate(_objects(name, files.parsed(name, content, choose, as_glue))):
            for key in row:
                if key not in columns:
                    columns[key] = [None] * count
            for key, values in columns.items():
                values.append(row.get(key))
        table = pa.table({key: _array(name, key, values) for key, values in columns.items()})
    with as_user_error(lambda reason: f"{name}: {reason}. Leave the column out, or give it another type."):
        rows = datasets.Dataset(table, split=split)
    if not len(rows):
        raise UserError(f"{name}: there are no rows. Give a file with rows.")
    return rows


def check_names(name: str, columns: list[str]) -> list[str]:
    """Return all columns. Raises UserError if two have the same name, except pandas' index columns."""
    for column, count in Counter(columns).items():
        if count > 1 and not files.is_index(column):
            raise UserError(f"{name}: {count} columns are named {column!r}. Rename all except one.")
    return columns


def each_row(located: Iterable[files.Located]) -> Iterator[files.Located]:
    """Yield the rows of `files.parsed`, also those in lists and in {"data": [ROW, ...]}, with their paths."""
    for where, value in located:
        inner = value.get("data") if isinstance(value, dict) and not where and "context" not in value else None
        if isinstance(inner, list) and (not inner or any(isinstance(row, dict) for row in inner)):
            where, value = "data", inner
        if isinstance(value, list):
            yield from ((f"{where}[{number}]", row) for number, row in enumerate(value))
        else:
            yield where, value


def _objects(name: str, located: Iterable[files.Located]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `files.parsed`. Raises UserError at the first mistake, or value that is not an object."""
    for where, row in each_row(located):
        if isinstance(row, Mistake):
            raise UserError(f"{name}: {row}. Fix the file.")
        if not isinstance(row, dict):
            raise UserError(f"{name}: {where}: should be an object ({shown(row)}). Fix the file.")
        yield row


def _array(name: str, column: str, values: list[Any]) -> pa.Array:
    """Make an array from a column's values. Raises UserError for the first value that breaks the common type."""
    import pyarrow as pa

    def problem(count: int) -> str:
        try:
            pa.array(values[:count])
        except (OverflowError, TypeError, ValueError) as error:
            return short_reason(error)
        return ""

    try:
        return pa.array(values)
    except (OverflowError, TypeError, ValueError):
        row = bisect_left(range(1, len(values) + 1), True, key=lambda count: problem(count) != "") + 1
    reason = f"{shown(values[row - 1])}: {problem(row)}"
    raise UserError(f"{name}: row {row}, column {column!r}: {reason}. Give the values of a column one type.")


def column(rows: Dataset, name: str) -> list[Any]:
    """Return the values of a column. Raises UserError if the column or a value is missing."""
    if name not in rows.column_names:
        found = ", ".join(rows.column_names)
        raise UserError(f"The {rows.split} data have no column `{name}`, only {found}. Rename one.")
    values = list(rows[name])
    for number, value in enumerate(values, start=1):
        if value is None or value == "" or value != value:  # NaN
            raise UserError(
                f"Row {number} of the {rows.split} data has no value in `{name}`. Fill it, or leave the row out."
            )
    return values


def text_column(rows: Dataset, name: str) -> list[str]:
    """Return the texts of a column. Integers become texts. Raises UserError for missing values and other types."""
    texts = []
    for number, value in enumerate(column(rows, name), start=1):
        try:
            texts.append(as_text(f"`{name}`", value))
        except Mistake as mistake:
            raise UserError(
                f"Row {number} of the {rows.split} data: {mistake}. Fix it, or name another column."
            ) from None
    return texts
