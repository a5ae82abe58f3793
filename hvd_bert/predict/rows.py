"""Predictions of a custom task for the rows of a file, computed on all ranks."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hvd_bert.config import command_line
from hvd_bert.config.data import ANSWERING
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT, UserError, as_user_error, log
from hvd_bert.model.cpu import kernels
from hvd_bert.model.layers import place
from hvd_bert.model.precision import set_precision
from hvd_bert.predict.writing import check, check_columns, check_new, reserved, written
from hvd_bert.tasks.base import task_class
from hvd_bert.tasks.dataset import DatasetTask
from hvd_bert.tasks.rows import read_rows

if TYPE_CHECKING:
    from datasets import Dataset


def predict_file(flags: argparse.Namespace, task_name: str, world: World) -> None:
    """Predict for the rows of --input. Write the rows, with predictions as added columns, to --output. A collective."""
    check(flags, world)
    with world.raise_on_all_ranks():
        # The settings, precision and kernels of the trainer's evaluation.
        config = command_line.parse(["--no_do_train", "--no_do_eval"], _settings(flags, task_name))
        set_precision(config.train)
        kernels.start(config.train.cpu_kernels, config.train.precision, world.device)
        cls = task_class(task_name)
        if not issubclass(cls, DatasetTask):
            raise UserError(f"--task {task_name} is no subclass of DatasetTask, so it cannot predict.")
        rows = read_rows(flags.input, "--input")
        check_columns(flags.output, rows.features.arrow_schema)
        task = cls(config, world)
    world.check_same({f"--{name}": value for name, value in config.as_flat().items()})
    place(task.model, world.device)
    with ExitStack() as output:
        with world.writing("--output", flags.output, EXIT_BAD_INPUT) as writes:
            if writes:
                new = output.enter_context(reserved(flags.output, flags.overwrite))
        # A few rows show the columns of the predictions, which may be refused. One might be squeezed to a number.
        first = rows.select(range(min(8, len(rows))))
        found = task.predict(first)
        with world.writing("--output", flags.output, EXIT_BAD_INPUT) as writes:
            if writes:
                check_columns(flags.output, _with_columns(first, flags, task_name, found).schema)
        found = task.predict(rows) if len(rows) > len(first) else found
        with world.writing("--output", flags.output) as writes:
            if writes:
                table = _with_columns(rows, flags, task_name, found)
                with written(new, flags.output.suffix, table.schema) as write:
                    write(table)
                output.close()
    log.info("%s: predictions for %d row(s)", flags.output, len(rows))


def _settings(flags: argparse.Namespace, task_name: str) -> dict[str, Any]:
    names = (*ANSWERING, "question_column", "context_column", "answer_column")
    given = {name: getattr(flags, name) for name in names if getattr(flags, name) is not None}
    return given | {
        "task": task_name,
        "model_name_or_path": flags.model,
        "bf16": flags.bf16,
        "cpu_kernels": flags.cpu_kernels,
        "per_device_eval_batch_size": flags.per_device_eval_batch_size,
        "strategy": flags.strategy,
    }


def _with_columns(rows: Dataset, flags: argparse.Namespace, task_name: str, found: Any) -> pa.Table:
    """Add the predictions as columns to the input's rows. Raises UserError if rows have columns of the same names."""
    table = rows.with_format("arrow")[:]
    columns = {"prediction": found} if isinstance(found, list) else found
    lists = isinstance(columns, dict) and all(isinstance(values, list) for values in columns.values())
    if not lists or any(len(values) != len(table) for values in columns.values()):
        raise UserError(
            f"--task {task_name}: its method `predictions` must return a list with a value for each example, or a dict"
            " of such lists."
        )
    table = table.drop_columns(check_new(flags, [name for name in columns if name in table.column_names]))
    for name, values in columns.items():
        with as_user_error(lambda reason: f"--task {task_name}: `predictions`: {reason}. Give values of one type."):
            table = table.append_column(name, pa.array(values))
    return table
