"""Answers questions with a trained model, in one process."""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from hvd_bert.config.command_line import load_yaml
from hvd_bert.config.flag import require_different_columns
from hvd_bert.config.settings import ModelArguments
from hvd_bert.config.tasks import QUESTION_ANSWERING
from hvd_bert.data import squad, windows
from hvd_bert.data.squad import Question
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.evaluation.evaluator import window_logits
from hvd_bert.evaluation.postprocess import Answer, SpanOptions, answers_of
from hvd_bert.model.bert import load_model, load_tokenizer
from hvd_bert.model.families import max_tokens

BATCH_SIZE = 8


def predict(
    model_name: str, questions: Sequence[Question], options: SpanOptions, max_seq_length: int | None = None
) -> list[Answer]:
    """Answer `questions` with the model from a folder or the hub, on the first GPU or else the CPU.

    `max_seq_length`: maximum window length in tokens; None: the model's maximum, but at most run_qa's 384.
    """
    if max_seq_length is not None and max_seq_length < 1:
        raise UserError(f"--max_seq_length {max_seq_length}: must be at least 1.")
    args = ModelArguments(model_name_or_path=model_name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(args)
    model = load_model(args, tokenizer, max_seq_length or 1, seed=0, needs_head=True).eval()
    model.to(device=device)
    length = max_seq_length or min(384, max_tokens(model.config))
    window_options = windows.WindowOptions(length, doc_stride=length // 3)
    with tempfile.TemporaryDirectory() as cache:
        source = squad.from_questions("the questions", questions)
        table = windows.prepare(source, tokenizer, window_options, cache_dir=cache)
        logits = window_logits(model, table, np.arange(len(table)), device, BATCH_SIZE, "fp32", [])
        return answers_of(questions, logits, options)


def run(flags: argparse.Namespace) -> int:
    """Answer the questions and print the answers. Returns the exit status."""
    try:
        _take_trained_settings(flags)
        questions = _questions(flags)
        options = SpanOptions(version_2_with_negative=flags.version_2_with_negative)
        answers = predict(flags.model, questions, options, flags.max_seq_length)
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print("\n\n".join(_shown(question, answer) for question, answer in zip(questions, answers, strict=True)))
    return EXIT_OK


def _take_trained_settings(flags: argparse.Namespace) -> None:
    """Take settings that the flags leave open from the model's training."""
    record = Path(flags.model) / "train_config.yaml"
    if record.is_file():
        trained = load_yaml(str(record))
        task = trained.get("task", QUESTION_ANSWERING)
        if task != QUESTION_ANSWERING:
            raise UserError(
                f"{flags.model} was trained with --task {task}: it answers no questions. To predict with it, run the"
                " trainer with --no_do_train and a --validation_file."
            )
        flags.max_seq_length = flags.max_seq_length or trained.get("max_seq_length")
        flags.version_2_with_negative |= bool(trained.get("version_2_with_negative"))


def _questions(flags: argparse.Namespace) -> list[Question]:
    if flags.questions_file:
        if flags.num_questions < 1:
            raise UserError(f"--num_questions {flags.num_questions}: must be at least 1.")
        columns = flags.question_column, flags.context_column, flags.answer_column
        require_different_columns(*columns)
        reading = squad.Reading(*columns, purpose="prediction")
        questions = squad.open_file(flags.questions_file, flags.version_2_with_negative, reading).questions()
        picked = np.linspace(0, len(questions), flags.num_questions, endpoint=False)
        return [questions[int(i)] for i in picked]
    if not flags.context or not flags.question:
        raise UserError("Give --context and --question, or --questions_file.")
    return [Question("question", "", flags.context, flags.question, (), ())]


def _shown(question: Question, answer: Answer) -> str:
    passage = textwrap.fill(question.context, 100, initial_indent="  ", subsequent_indent="  ")
    probability = float(answer.nbest[0]["probability"])
    lines = [
        passage,
        f"  Q: {question.question}",
        f"  A: {answer.text or '(no answer)'}  (probability {probability:.2f})",
    ]
    if question.answer_texts:
        lines.append(f"  expected: {question.answer_texts[0]}")
    return "\n".join(lines)
