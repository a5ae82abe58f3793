"""Answers questions: prints answers in a single process, or writes them to a file with all ranks.

For a file, every rank answers one block of questions per round. Then rank 0 writes the round's answers.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import textwrap
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tqdm import tqdm

from hvd_bert.config.data import ANSWERING
from hvd_bert.data.counts import FileCounts, WindowCounts
from hvd_bert.data.sources import squad
from hvd_bert.data.sources.squad import Question, Source
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, log, visible
from hvd_bert.evaluation.postprocess import Answer
from hvd_bert.model.cpu import kernels
from hvd_bert.predict.answerer import QuestionAnswerer, blocks
from hvd_bert.predict.writing import Write, check, reserved, written
from hvd_bert.tasks.tokenizer import tokenizer_digest

PRINTED = 3  # number of answers printed without --output
WIDTH = 100
Row = dict[str, Any]
COLUMNS = dict.fromkeys(("id", "question", "context", "answer"), pa.string())
COLUMNS |= {"start": pa.int64(), "end": pa.int64(), "probability": pa.float64(), "null_odds": pa.float64()}
NUMBERS = dict.fromkeys(("probability", "start_logit", "end_logit"), pa.float64())
CANDIDATES = pa.list_(pa.struct({"text": pa.string(), "start": pa.int64(), "end": pa.int64()} | NUMBERS))


def run(flags: argparse.Namespace) -> None:
    """Print the answer to --question, or a few answers for --input. Raises UserError."""
    qa = load_model(flags, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if flags.input:
        _print_some(flags, qa)
    else:
        answer = qa(question=flags.question, context=flags.context)
        _show(flags.context, flags.question, answer)


def load_model(flags: argparse.Namespace, device: torch.device) -> QuestionAnswerer:
    """Select the CPU kernels, and load the model with the command line's settings."""
    settings = {name: getattr(flags, name) for name in ANSWERING}
    precision, batch_size = "bf16" if flags.bf16 else "fp32", flags.per_device_eval_batch_size
    kernels.start(flags.cpu_kernels, precision, device)
    return QuestionAnswerer(flags.model, device=device, precision=precision, batch_size=batch_size, **settings)


def open_input(flags: argparse.Namespace, qa: QuestionAnswerer) -> Source:
    """Open --input as a source of questions."""
    columns = flags.question_column, flags.context_column, flags.answer_column
    reading = squad.Reading(*columns, purpose="prediction")
    return squad.open_file(flags.input, qa.span_options.version_2_with_negative, reading)


def _print_some(flags: argparse.Namespace, qa: QuestionAnswerer) -> None:
    questions = open_input(flags, qa).questions()
    picked = np.linspace(0, len(questions), min(PRINTED, len(questions)), endpoint=False)
    for number in picked.astype(int):
        question = questions[number]
        (answer,) = qa.answers([question])
        _show(question.context, question.question, answer)
        if question.answer_texts:
            print(visible(f"  expected: {question.answer_texts[0]}"))
        print()
    print(f"{len(picked)} of {len(questions)} questions. To answer all of them, name a file with --output.")


def _show(context: str, question: str, answer: Answer) -> None:
    """Print an answer with its context and question. Control characters are escaped."""
    passage = textwrap.fill(context, WIDTH, initial_indent="  ", subsequent_indent="  ")
    said = f"{answer.text or '(no answer)'}  (probability {answer.score:.2f})"
    print(visible(f"{passage}\n  Q: {question}\n  A: {said}"))


def answer_file(flags: argparse.Namespace, world: World) -> None:
    """Answer the questions in --input and write --output, which appears once it is complete. A collective."""
    check(flags, world)
    with world.raise_on_all_ranks():
        qa = load_model(flags, world.device)
        source = open_input(flags, qa)
        questions = source.questions()
    world.check_same(_common_inputs(qa, source))
    all_blocks = list(blocks(questions))
    quiet = world.rank > 0 or not sys.stderr.isatty()
    with ExitStack() as stack, tqdm(total=len(questions), desc="Answering", unit="question", disable=quiet) as bar:
        write: Write | None = None
        with world.writing("--output", flags.output, EXIT_BAD_INPUT):
            if world.rank == 0:
                columns = COLUMNS | ({"nbest": CANDIDATES} if flags.n_best != 0 else {})
                schema = pa.schema(list(columns.items()))
                new = stack.enter_context(reserved(flags.output, flags.overwrite))
                write = stack.enter_context(written(new, flags.output.suffix, schema))
        for first in range(0, len(all_blocks), world.size):
            rows: list[Row] = []
            with world.raise_on_all_ranks(EXIT_FAILURE):
                if first + world.rank < len(all_blocks):  # in the last round, some ranks may have no block
                    block = all_blocks[first + world.rank]
                    rows += map(partial(_row, flags), block, qa.answer_block(block))
            gathered = list(chain.from_iterable(world.gather(rows)))  # rank 0: all ranks' rows; others: none
            with world.writing("--output", flags.output):
                if write:
                    write(pa.Table.from_pylist(gathered, schema))
            bar.update(len(gathered))
        with world.writing("--output", flags.output):
            stack.close()
    counts = world.gather(qa.counts)  # rank 0: of all ranks; others: none
    if counts:
        FileCounts(source.name, "prediction", sum(counts, WindowCounts())).warn()
    log.info("%s: %d question(s) answered", flags.output, len(questions))


def _common_inputs(qa: QuestionAnswerer, source: Source) -> dict[str, object]:
    """Return facts that must be equal on all ranks."""
    digest = hashlib.sha256(qa.model.config.to_json_string().encode())
    for weights in qa.model.state_dict().values():
        digest.update(weights.cpu().contiguous().numpy())
    return {
        "the model": digest.hexdigest()[:16],
        "the tokenizer": tokenizer_digest(qa.tokenizer),
        "the settings": asdict(qa.window_options) | asdict(qa.span_options),
        "the input": source.digest[:16],
    }


def _row(flags: argparse.Namespace, question: Question, answer: Answer) -> Row:
    row = {
        "id": question.id,
        "question": question.question,
        "context": question.context,
        "answer": answer.text,
        "start": answer.start,
        "end": answer.end,
        "probability": answer.score,
        "null_odds": answer.null_odds,
    }
    if flags.n_best == 0:
        return row
    return row | {"nbest": [asdict(candidate) for candidate in answer.nbest[: flags.n_best]]}
