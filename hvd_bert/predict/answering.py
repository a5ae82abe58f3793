"""Answers questions: prints answers in a single process, or writes them to a file with all ranks.

For a file, every rank answers one block of questions per round. Then rank 0 writes the round's answers, and the rows
between them that cannot be answered.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice, starmap
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.data import ANSWERING
from hvd_bert.config.settings import FLAGS
from hvd_bert.data.counts import FileCounts, WindowCounts
from hvd_bert.data.sources import files, squad
from hvd_bert.data.sources.questions import Mistake, checked, text_mistake
from hvd_bert.data.sources.squad import Question, Reading
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, log, visible
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.model.cpu import kernels
from hvd_bert.predict.answerer import QuestionAnswerer, blocks
from hvd_bert.predict.writing import Write, check, check_columns, check_new, json_text, reserved, written
from hvd_bert.tasks.rows import check_names
from hvd_bert.tasks.tokenizer import tokenizer_digest

PRINTED = 3  # number of answers printed without --output
WIDTH = 100
SHOWN = 3  # number of mistakes in a message
Row = dict[str, Any]
COLUMNS = dict.fromkeys(("id", "question", "context", "answer"), pa.string())
COLUMNS |= {"start": pa.int64(), "end": pa.int64(), "probability": pa.float64(), "null_odds": pa.float64()}
COLUMNS |= {"error": pa.string()}
NUMBERS = dict.fromkeys(("probability", "start_logit", "end_logit"), pa.float64())
CANDIDATES = pa.list_(pa.struct({"text": pa.string(), "start": pa.int64(), "end": pa.int64()} | NUMBERS))


@dataclass(frozen=True)
class Input:
    """The content of --input.

    Attributes:
        digest: SHA-256 of the file.
        questions: A question per row, also of rows that cannot be answered.
        mistakes: Why rows cannot be answered, by their number.
        columns: Further columns that the output keeps: name -> values, or the column of COLUMNS with these values.
    """

    digest: str
    questions: list[Question]
    mistakes: dict[int, Mistake]
    columns: dict[str, pa.ChunkedArray | str]

    @property
    def answerable(self) -> list[int]:
        """The numbers of the rows that can be answered."""
        return [number for number in range(len(self.questions)) if number not in self.mistakes]

    @property
    def problem(self) -> str:
        """How many rows cannot be answered, and the first of them; "" if there are none."""
        first = [f"{mistake!s:.120}" for mistake in islice(self.mistakes.values(), SHOWN)]
        return f"{len(self.mistakes):,} row(s) cannot be answered, first: {'; '.join(first)}" if first else ""


def run(flags: argparse.Namespace) -> None:
    """Print the answer to --question, or a few answers for --input. Raises UserError."""
    qa = load_model(flags, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if flags.input:
        _print_some(flags, qa)
    else:
        answer = qa(question=flags.question, context=flags.context)
        _show(flags.context, flags.question, answer)
    if qa.threshold:
        print(visible(qa.threshold))


def load_model(flags: argparse.Namespace, device: torch.device) -> QuestionAnswerer:
    """Select the CPU kernels, and load the model with the command line's settings."""
    settings = {name: getattr(flags, name) for name in ANSWERING}
    precision, batch_size = "bf16" if flags.bf16 else "fp32", flags.per_device_eval_batch_size
    kernels.start(flags.cpu_kernels, precision, device)
    qa = QuestionAnswerer(flags.model, device=device, precision=precision, batch_size=batch_size, **settings)
    qa.span_options = replace(qa.span_options, n_best_size=max(qa.span_options.n_best_size, flags.n_best))
    return qa


# --- the input -----------------------------------------------------------------------------------


def read_input(flags: argparse.Namespace) -> Input:
    """Read --input. Raises UserError if no row can be answered, or if --output cannot have a column."""
    name, present = flags.input, list[str]()
    with files.opened(name) as file:
        packed = file.read()
    content = files.unpacked(name, packed)

    def choose(columns: list[str]) -> list[str]:
        present.extend(check_names(name, columns))
        return squad.Columns(name, _reading(flags, present)).choose(columns)

    rows: Iterator[tuple[str, Any]] = chain.from_iterable(
        starmap(_rows, files.parsed(name, content, choose, whole_ids=True))
    )
    first = [*islice(rows, 1)]
    if not present:  # JSON whose rows have objects, for which `choose` is not called
        first += rows
        present += dict.fromkeys(key for _, row in first if isinstance(row, dict) for key in row)
    reading = _reading(flags, present)
    kept = _kept(flags, reading, present)
    is_parquet = content.startswith(files.PARQUET)
    values: dict[str, list[Any]] = {column: [] for column, source in kept.items() if not (source or is_parquet)}
    questions: list[Question] = []
    mistakes: dict[int, Mistake] = {}
    for at, row in chain(first, rows):
        cells = row if isinstance(row, dict) else {}
        for where, item in squad.found_in(at, row, reading):
            question, mistake = _question(where, item, cells, reading)
            if mistake:
                mistakes[len(questions)] = mistake
            questions.append(question)
            for column in values:
                values[column].append(cells.get(column))
    if len(mistakes) == len(questions):
        checked(name, [("", mistake) for mistake in mistakes.values()], True, reading)  # raises UserError
    columns = {column: _array(values.pop(column), flags.output.suffix) for column in [*values]}
    if is_parquet:
        with files.parquet_file(name, content) as parquet:
            table = parquet.read([column for column, source in kept.items() if not source])
            columns = dict(zip(table.column_names, table.columns, strict=True))
    if flags.output:
        check_columns(flags.output, pa.schema([(column, array.type) for column, array in columns.items()]))
    digest = hashlib.sha256(packed).hexdigest()
    return Input(digest, questions, mistakes, {column: source or columns[column] for column, source in kept.items()})


def _reading(flags: argparse.Namespace, present: Collection[str]) -> Reading:
    """Choose the columns: those that the flags name, else those of the training if `present`, else SQuAD's."""
    trained, names = trained_settings(flags.model), {}
    for flag in ("question_column", "context_column", "answer_column"):
        default = FLAGS[flag].default
        of_training = trained.get(flag, default)
        names[flag] = getattr(flags, flag) or (of_training if of_training in present else default)
    return Reading(**names, purpose="prediction")


def _kept(flags: argparse.Namespace, reading: Reading, present: Sequence[str]) -> dict[str, str]:
    """Choose the further columns that --output keeps: name -> the column of COLUMNS with the same values, or "".

    Raises UserError for names of the output's own columns, unless --overwrite_columns is given.
    """
    if not flags.output or reading.question_column not in present:  # SQuAD's nested levels
        return {}
    sources = {reading.question_column: "question", reading.context_column: "context", "id": "id"}
    kept = {column: sources.get(column, "") for column in present if sources.get(column) != column}
    taken = check_new(flags, [name for name in _schema(flags).names if name in kept])
    return {column: source for column, source in kept.items() if column not in taken}


def _rows(where: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a list, also of {"data": [ROW, ...]}, with the paths that `read_questions` gives them."""
    if isinstance(node, dict) and not where and not {"title", "context"} & node.keys():
        inner = node.get("data")
        if isinstance(inner, list) and all(isinstance(row, dict) for row in inner):
            where, node = "data", inner
    yield from ((f"{where}[{n}]", row) for n, row in enumerate(node)) if isinstance(node, list) else [(where, node)]


def _question(
    where: str, item: Question | Mistake, cells: Mapping[str, Any], reading: Reading
) -> tuple[Question, Mistake | None]:
    """Return a row's question, and the mistake for which it cannot be answered. Its texts are then made writable."""
    given: list[Any]
    if isinstance(item, Question):
        reason = text_mistake(item)
        if not reason:
            return item, None
        given, mistake = [item.id, item.context, item.question], Mistake("unusable text", reason, where)
    else:
        given = [cells.get(name) for name in ("id", reading.context_column, reading.question_column)]
        mistake = item
    id_, context, question = map(_text, given)
    return Question(id_ or where, "", context, question, (), ()), mistake


def _array(values: list[Any], suffix: str) -> pa.Array:
    """Make an array of a column of JSON or CSV. .jsonl keeps all values; else those of different types become texts."""
    if suffix == ".jsonl":
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array(map(json_text, values), pa.string()))
    try:
        array = pa.array(values)
    except (ArithmeticError, TypeError, ValueError):
        array = None
    if array is None or (suffix == ".csv" and pa.types.is_nested(array.type)):
        array = pa.array([None if value is None else _text(value) for value in values], pa.string())
    return array


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else "" if value is None else json_text(value)
    return text.encode(errors="backslashreplace").decode()


# --- the output ----------------------------------------------------------------------------------


def _print_some(flags: argparse.Namespace, qa: QuestionAnswerer) -> None:
    given = read_input(flags)
    questions = [given.questions[number] for number in given.answerable]
    picked = np.linspace(0, len(questions), min(PRINTED, len(questions)), endpoint=False)
    for number in picked.astype(int):
        question = questions[number]
        (answer,) = qa.answers([question])
        _show(question.context, question.question, answer)
        if question.answer_texts:
            print(visible(f"  expected: {question.answer_texts[0]}"))
        print()
    print(f"{len(picked)} of {len(questions)} questions. To answer all of them, name a file with --output.")
    if given.mistakes:
        print(visible(f"{given.problem}."))


def _show(context: str, question: str, answer: Answer) -> None:
    """Print an answer with its context and question. Control characters are escaped."""
    passage = textwrap.fill(context, WIDTH, initial_indent="  ", subsequent_indent="  ")
    said = f"{answer.text or '(no answer)'}  (probability {answer.score:.2f})"
    print(visible(f"{passage}\n  Q: {question}\n  A: {said}"))


def answer_file(flags: argparse.Namespace, world: World) -> None:
    """Answer the questions in --input and write --output, which appears once it is complete. A collective.

    Raises CollectiveError if rows could not be answered, after all others are written.
    """
    check(flags, world)
    with world.raise_on_all_ranks():
        given = read_input(flags)
        qa = load_model(flags, world.device)
    world.check_same(_common_inputs(qa, given))
    answerable = given.answerable
    all_blocks = list(blocks(given.questions[number] for number in answerable))
    quiet = world.rank > 0 or not sys.stderr.isatty()
    with ExitStack() as stack, tqdm(total=len(answerable), desc="Answering", unit="question", disable=quiet) as bar:
        write: Write | None = None
        with world.writing("--output", flags.output, EXIT_BAD_INPUT):
            if world.rank == 0:
                new = stack.enter_context(reserved(flags.output, flags.overwrite))
                schema = _schema(flags, given)
                write = stack.enter_context(written(new, flags.output.suffix, schema))
        done = 0  # rows that are answered
        ends = [*answerable, len(given.questions)]  # numbers of the rows
        for first in range(0, len(all_blocks), world.size):
            rows: list[Row] = []
            with world.raise_on_all_ranks(EXIT_FAILURE):
                if first + world.rank < len(all_blocks):  # in the last round, some ranks may have no block
                    block = all_blocks[first + world.rank]
                    rows += map(partial(_row, flags.n_best), qa.answer_block(block))
            gathered = list(chain.from_iterable(world.gather(rows)))  # rank 0: all ranks' rows; others: none
            with world.writing("--output", flags.output):
                if write:
                    start = ends[done] if done else 0
                    write(_table(given, range(start, ends[done + len(gathered)]), gathered, schema))
            done += len(gathered)
            bar.update(len(gathered))
        with world.writing("--output", flags.output):
            stack.close()
    counts = world.gather(qa.counts)  # rank 0: of all ranks; others: none
    if counts:
        FileCounts(flags.input, "prediction", sum(counts, WindowCounts())).warn()
    if given.mistakes:
        raise CollectiveError(
            f"{flags.output}: {len(answerable):,} question(s) answered, but {given.problem}. All reasons are in the"
            " file's column error. Fix these rows, or leave them out."
        )
    log.info("%s: %d question(s) answered", flags.output, len(answerable))


def _schema(flags: argparse.Namespace, given: Input | None = None) -> pa.Schema:
    """Return the columns of --output; without `given` those that every output has."""
    columns = COLUMNS | ({"nbest": CANDIDATES} if flags.n_best else {})
    kept = given.columns if given else {}
    types = {name: pa.string() if isinstance(values, str) else values.type for name, values in kept.items()}
    return pa.schema([*(columns | types).items()])


def _table(given: Input, numbers: range, answers: Sequence[Row], schema: pa.Schema) -> pa.Table:
    """Make the rows of --output with these numbers. `answers`: the columns of those that were answered."""
    answered, rows = iter(answers), []
    for number in numbers:
        question, mistake = given.questions[number], given.mistakes.get(number)
        row = {"answer": "", "error": _text(str(mistake))} if mistake else next(answered)
        rows.append({"id": question.id, "question": question.question, "context": question.context} | row)
    own = [field for field in schema if field.name not in given.columns]
    table = pa.Table.from_pylist(rows, pa.schema(own))
    for name, values in given.columns.items():
        array = table[values] if isinstance(values, str) else values.slice(numbers.start, len(numbers))
        table = table.append_column(schema.field(name), array)
    return table


def _common_inputs(qa: QuestionAnswerer, given: Input) -> dict[str, object]:
    """Return facts that must be equal on all ranks."""
    digest = hashlib.sha256(qa.model.config.to_json_string().encode())
    for weights in qa.model.state_dict().values():
        digest.update(weights.cpu().contiguous().numpy())
    return {
        "the model": digest.hexdigest()[:16],
        "the tokenizer": tokenizer_digest(qa.tokenizer),
        "the settings": asdict(qa.window_options) | asdict(qa.span_options),
        "the input": given.digest[:16],
    }


def _row(n_best: int, answer: Answer) -> Row:
    row = {
        "answer": answer.text,
        "start": answer.start,
        "end": answer.end,
        "probability": answer.score,
        "null_odds": answer.null_odds,
    }
    return row | {"nbest": [asdict(candidate) for candidate in answer.nbest[:n_best]]} if n_best else row
