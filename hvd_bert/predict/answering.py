"""Answers that are printed: to one question, to some of a file, or at a prompt. In one process."""

from __future__ import annotations

import argparse
import sys
import textwrap
from contextlib import suppress
from typing import Any

import numpy as np

from hvd_bert.config.flag import require_different_columns
from hvd_bert.config.values import passage
from hvd_bert.data.sources import squad
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.predict.answer import FoundAnswer
from hvd_bert.predict.answerer import QuestionAnswerer
from hvd_bert.rendering.text import visible

PRINTED = 3  # answers of a file
WIDTH = 100


def run(flags: argparse.Namespace) -> int:
    """Answer and print. Returns the exit status."""
    try:
        qa = load_model(flags)
        if flags.input:
            _print_some(flags, qa)
        elif flags.question:
            answer = qa(question=flags.question, context=flags.context)
            _print(f"{_passage(flags.context)}\n  Q: {flags.question}\n{_line(answer)}")
        else:
            prompt(qa, flags.context)
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


def load_model(flags: argparse.Namespace, **options: Any) -> QuestionAnswerer:
    """The model with the settings of the command line."""
    options |= {name: getattr(flags, name) for name in flags.settings}
    precision = "bf16" if flags.bf16 else "fp32"
    return QuestionAnswerer(flags.model, precision=precision, batch_size=flags.per_device_eval_batch_size, **options)


def open_input(flags: argparse.Namespace, qa: QuestionAnswerer) -> squad.Source:
    """The questions of --input."""
    columns = flags.question_column, flags.context_column, flags.answer_column
    require_different_columns(*columns)
    reading = squad.Reading(*columns, purpose="prediction")
    return squad.open_file(flags.input, qa.span_options.version_2_with_negative, reading)


def _print_some(flags: argparse.Namespace, qa: QuestionAnswerer) -> None:
    questions = open_input(flags, qa).questions()
    picked = np.linspace(0, len(questions), min(PRINTED, len(questions)), endpoint=False)
    for number in picked.astype(int):
        question = questions[number]
        (answer,) = qa.answers([question])
        _print(f"{_passage(question.context)}\n  Q: {question.question}\n{_line(FoundAnswer.of(answer))}")
        if question.answer_texts:
            _print(f"  expected: {question.answer_texts[0]}")
        print()
    print(f"{len(picked)} of {len(questions)} questions. To answer all of them, name a file with --output.")


def _print(text: str) -> None:
    """Print a text in which a passage is no command to the terminal."""
    print(visible(text))


def prompt(qa: QuestionAnswerer, context: str | None) -> None:
    """Ask for a context and for questions about it, until the end of the input (Ctrl-D)."""
    with suppress(ImportError):  # lines can be edited and repeated
        import readline  # noqa: F401
    print("An empty question asks for another context. Ctrl-D ends.")
    with suppress(EOFError):
        while True:
            while not context:
                context = _asked_context()
            question = _typed("Question: ").strip()
            if not question:
                context = None
                continue
            try:
                _print(_line(qa(question=question, context=context)))
            except UserError as error:
                print(f"  {error}")
    print()


def _asked_context() -> str:
    """A context of one or more lines, as it is typed or pasted."""
    lines = [_typed("Context, then an empty line: ")]
    while lines[-1]:
        lines.append(_typed())
    return "\n".join(lines).strip()


def _typed(shown: str = "") -> str:
    """A line of the terminal. One that is not UTF-8 text is asked for again."""
    while True:
        try:
            return passage(input(shown))
        except (UnicodeDecodeError, argparse.ArgumentTypeError):  # the first in a locale of UTF-8
            print("  That line is not UTF-8 text. Type it again.")


def _passage(context: str) -> str:
    return textwrap.fill(context, WIDTH, initial_indent="  ", subsequent_indent="  ")


def _line(answer: FoundAnswer) -> str:
    return f"  A: {answer.text or '(no answer)'}  (probability {answer.score:.2f})"
