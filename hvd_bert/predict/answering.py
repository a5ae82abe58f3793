"""Answers questions: prints answers in a single process, or writes them to a file with all ranks.

For a file, every rank answers one block of questions per round. Then rank 0 writes the round's answers, and the rows
between them that cannot be answered.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from hvd_bert.config.data import ANSWERING
from hvd_bert.data.counts import FileCounts, WindowCounts
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, UserError, log, visible
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.model.cpu import kernels
from hvd_bert.predict.answerer import QuestionAnswerer, blocks, describe_threshold
from hvd_bert.predict.reading import Input, read_input
from hvd_bert.predict.writing import Write, check, escaped, reserved, written
from hvd_bert.tasks.tokenizer import tokenizer_digest

PRINTED = 3  # number of answers printed without --output
WIDTH = 100
Row = dict[str, Any]
COLUMNS = dict.fromkeys(("id", "question", "context", "answer"), pa.string())
COLUMNS |= {"start": pa.int64(), "end": pa.int64(), "probability": pa.float64(), "null_odds": pa.float64()}
COLUMNS |= {"error": pa.string()}
NUMBERS = dict.fromkeys(("probability", "start_logit", "end_logit"), pa.float64())
CANDIDATES = pa.list_(pa.struct({"text": pa.string(), "start": pa.int64(), "end": pa.int64()} | NUMBERS))


def run(flags: argparse.Namespace) -> None:
    """Print the answer to --question, or a few answers for --input.

    Raises UserError also if rows of --input cannot be answered, after the printing.
    """
    qa = load_model(flags, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    problem = ""
    if flags.input:
        problem = _print_some(flags, qa)
    else:
        answer = qa(question=flags.question, context=flags.context)
        _show(flags.context, flags.question, answer)
    if threshold := describe_threshold(flags.model, qa.span_options):
        print(visible(threshold))
    if problem:
        raise UserError(f"{flags.input}: {problem}. Fix these rows, or leave them out.")


def load_model(flags: argparse.Namespace, device: torch.device) -> QuestionAnswerer:
    """Select the CPU kernels, and load the model with the command line's settings."""
    settings = {name: getattr(flags, name) for name in ANSWERING}
    precision, batch_size = "bf16" if flags.bf16 else "fp32", flags.per_device_eval_batch_size
    kernels.start(flags.cpu_kernels, precision, device)
    qa = QuestionAnswerer(flags.model, device=device, precision=precision, batch_size=batch_size, **settings)
    qa.span_options = replace(qa.span_options, listed=flags.n_best)
    return qa


def _print_some(flags: argparse.Namespace, qa: QuestionAnswerer) -> str:
    """Print a few answers. Returns `Input.problem`."""
    given = read_input(flags, ())
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
    return given.problem


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
        given = read_input(flags, _schema(flags).names)
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
                schema = _schema(flags, given.kept.schema)
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


def _schema(flags: argparse.Namespace, kept: Iterable[pa.Field] = ()) -> pa.Schema:
    """Return the columns of --output: its own ones, and `kept` ones of --input."""
    own = COLUMNS | ({"nbest": CANDIDATES} if flags.n_best else {})
    return pa.schema([*own.items(), *((field.name, field.type) for field in kept)])


def _table(given: Input, numbers: range, answers: Sequence[Row], schema: pa.Schema) -> pa.Table:
    """Make the rows of --output with these numbers. `answers`: the columns of those that were answered."""
    answered, rows = iter(answers), []
    for number in numbers:
        question, mistake = given.questions[number], given.mistakes.get(number)
        row = {"answer": "", "error": escaped(str(mistake))} if mistake else next(answered)
        rows.append({"id": question.id, "question": question.question, "context": question.context} | row)
    kept = given.kept.slice(numbers.start, len(numbers)).columns
    own = pa.schema([*schema][: len(schema) - len(kept)])
    return pa.Table.from_arrays([*pa.Table.from_pylist(rows, own).columns, *kept], schema=schema)


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
