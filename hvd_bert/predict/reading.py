"""Reads --input: a question per row, the rows that cannot be answered, and the columns that --output keeps."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.settings import FLAGS
from hvd_bert.data.sources import files, squad
from hvd_bert.data.sources.questions import Mistake, checked, text_mistake
from hvd_bert.data.sources.squad import Question, Reading
from hvd_bert.predict.writing import as_cell, as_json, check_columns, check_new, escaped
from hvd_bert.tasks.rows import check_names, each_row

SHOWN = 3  # number of mistakes in a message


@dataclass(frozen=True)
class Input:
    """The content of --input."""

    digest: str  # SHA-256 of the file
    questions: list[Question]  # a question per row, also of rows that cannot be answered
    mistakes: dict[int, Mistake]  # why rows cannot be answered, by their number
    kept: pa.Table  # the columns that --output keeps

    @property
    def answerable(self) -> list[int]:
        """The numbers of the rows that can be answered."""
        return [number for number in range(len(self.questions)) if number not in self.mistakes]

    @property
    def problem(self) -> str:
        """How many rows cannot be answered, and the first of them; "" if there are none."""
        first = [f"{mistake!s:.120}" for mistake in islice(self.mistakes.values(), SHOWN)]
        return f"{len(self.mistakes):,} row(s) cannot be answered, first: {'; '.join(first)}" if first else ""


def read_input(flags: argparse.Namespace, own: Sequence[str]) -> Input:
    """Read --input. `own`: the columns that every --output has.

    Raises UserError if no row can be answered, or if --output cannot have a column.
    """
    with files.opened(flags.input) as file:
        packed = file.read()
    content = files.unpacked(flags.input, packed)
    trained = trained_settings(flags.model)
    rows, present = _rows(flags, trained, content)
    reading = _reading(flags, trained, present)
    kept = _kept(flags, reading, present, own)
    questions: list[Question] = []
    mistakes: dict[int, Mistake] = {}
    cells: list[Mapping[str, Any]] = []  # of each question's row
    for at, row in rows:
        for where, item in squad.found_in(at, row, reading):
            cells.append(row if isinstance(row, dict) else {})
            question, mistake = _question(where, item)
            if mistake:
                mistakes[len(questions)] = mistake
            questions.append(question)
    if len(mistakes) == len(questions):
        checked(flags.input, [("", mistake) for mistake in mistakes.values()], True, reading)  # raises UserError
    return Input(hashlib.sha256(packed).hexdigest(), questions, mistakes, _columns(flags, content, kept, cells))


def _rows(
    flags: argparse.Namespace, trained: Mapping[str, Any], content: bytes
) -> tuple[list[files.Located], Collection[str]]:
    """Parse the rows, and return them with their columns. Raises UserError if there is no column of questions."""
    present: list[str] = []

    def choose(columns: list[str]) -> list[str]:
        present.extend(check_names(flags.input, columns))
        return squad.Columns(flags.input, _reading(flags, trained, present)).choose(columns)

    rows = [*each_row(files.parsed(flags.input, content, choose, whole_ids=True))]
    # JSON whose rows have objects does not call `choose`.
    return rows, present or dict.fromkeys(key for _, row in rows if isinstance(row, dict) for key in row)


def _reading(flags: argparse.Namespace, trained: Mapping[str, Any], present: Collection[str]) -> Reading:
    """Choose the columns: those that the flags name, else those of the training if `present`, else SQuAD's."""
    names = {}
    for flag in ("question_column", "context_column", "answer_column"):
        default = FLAGS[flag].default
        of_training = trained.get(flag, default)
        names[flag] = getattr(flags, flag) or (of_training if of_training in present else default)
    return Reading(**names, purpose="prediction")


def _kept(flags: argparse.Namespace, reading: Reading, present: Collection[str], own: Sequence[str]) -> list[str]:
    """Choose the columns that --output keeps: all, except those that become its columns of the same name.

    Raises UserError for further names of the output's own columns, unless --overwrite_columns is given.
    """
    if not flags.output or reading.question_column not in present:  # SQuAD's nested levels
        return []
    same = {"id", *({"question", "context"} & {reading.question_column, reading.context_column})}
    kept = [column for column in present if column not in same]
    taken = check_new(flags, [name for name in own if name in kept])
    return [column for column in kept if column not in taken]


def _columns(
    flags: argparse.Namespace, content: bytes, kept: Sequence[str], cells: Sequence[Mapping[str, Any]]
) -> pa.Table:
    """Make a table of the columns `kept`. Those of Parquet keep their types. `cells`: the rows of JSON or CSV."""
    if not kept or not content.startswith(files.PARQUET):
        return pa.table({escaped(name): _array([row.get(name) for row in cells], flags.output.suffix) for name in kept})
    with files.parquet_file(flags.input, content) as parquet:
        table = parquet.read(kept)
    check_columns(flags.output, table.schema)
    return table


def _question(where: str, item: Question | Mistake) -> tuple[Question, Mistake | None]:
    """Return a row's question, and the mistake for which it cannot be answered. Its texts are then made writable."""
    if isinstance(item, Mistake):
        mistake, given = item, item.given
    elif reason := text_mistake(item):
        mistake, given = Mistake("unusable text", reason, where), (item.id, item.context, item.question)
    else:
        return item, None
    id_, context, question = (as_cell(value) or "" for value in given)
    return Question(id_ or where, "", context, question, (), ()), mistake


def _array(values: list[Any], suffix: str) -> pa.Array:
    """Make an array of a column of JSON or CSV. .jsonl keeps all values; else those of different types become texts."""
    if suffix == ".jsonl":
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array(map(as_json, values), pa.string()))
    try:
        array = pa.array(values)
    except (ArithmeticError, TypeError, ValueError):
        array = None
    if array is None or (suffix == ".csv" and pa.types.is_nested(array.type)):
        array = pa.array(map(as_cell, values), pa.string())
    return array
