"""Rows of data files and of the hub's data sets, as `datasets.Dataset`, for tasks of one's own."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from hvd_bert import hub
from hvd_bert.config.settings import Config
from hvd_bert.data.sources import files
from hvd_bert.errors import UserError, as_user_error, short_reason

if TYPE_CHECKING:
    from datasets import Dataset

# Endings of a file's name, also before .gz -> the reader of `datasets` and its options. "NA" is a text, as others are,
# and so are the quotes in files with tabs, such as GLUE's.
_JSON: tuple[str, dict[str, Any]] = ("json", {})
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "delimiter": "\t", "quoting": csv.QUOTE_NONE}),
    ".jsonl": _JSON,
    ".json": _JSON,
    ".parquet": ("parquet", {}),
}


def load_rows(config: Config, name: Literal["train", "validation"], split: str | None = None) -> Dataset | None:
    """The rows of --train_file or --validation_file, or those of --dataset_name in its `split` (default: `name`).

    None if the run does not train or does not evaluate, or has no validation data. Index columns of pandas are left
    out. Of the validation rows there are at most --max_eval_samples. Raises UserError.
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
    """The rows of a file that `flag` names, in memory. Raises UserError."""
    import datasets

    split = flag.removeprefix("--").removesuffix("_file")  # named in messages
    reader, options = _READERS.get(Path(path.lower().removesuffix(".gz")).suffix, ("", {}))
    if not reader:
        raise UserError(f"{flag} {path}: its name must end with {', '.join(_READERS)}, or with one of them and .gz.")
    with files.opened(path, f"{flag} {path}"):  # reports a missing file
        pass
    datasets.disable_progress_bars()  # else every rank would show them
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs the errors that it raises
    with TemporaryDirectory() as cache:  # ranks would wait for each other's lock on a shared cache
        try:
            rows = datasets.load_dataset(
                reader,
                data_files={split: path},
                split=split,
                cache_dir=cache,
                keep_in_memory=True,
                trust_remote_code=False,
                **options,
            )
        except Exception as error:
            cause = error.__cause__ or error  # `datasets` wraps the reader's own
            remedy = "Save it as UTF-8, in Excel as 'CSV UTF-8'" if isinstance(cause, UnicodeError) else "Fix the file"
            raise UserError(f"{flag} {path}: cannot be read ({short_reason(cause)}). {remedy}.") from None
    if not len(rows):
        raise UserError(f"{flag} {path}: there are no rows. Give a file with rows.")
    return rows


def column(rows: Dataset, name: str) -> list[Any]:
    """The values of a column. Raises UserError without the column, or if a value is missing."""
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
