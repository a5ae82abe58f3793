"""Answers all questions of a file, on all ranks, and writes them to another.

In each round every rank answers one block. Rank 0 collects and keeps the answers. Blocks of about the same size share a
round, so that no rank waits long.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from tqdm import tqdm
from transformers import PreTrainedModel

from hvd_bert.data.sources.squad import Question, Source
from hvd_bert.distributed.world import World, log
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE
from hvd_bert.model.cpu.malloc import keep_memory
from hvd_bert.predict import answerer
from hvd_bert.predict.answer import FoundAnswer
from hvd_bert.predict.answerer import QuestionAnswerer, blocks
from hvd_bert.predict.answering import load_model, open_input
from hvd_bert.predict.unfinished import Row, Unfinished
from hvd_bert.storage.writing import writing_to
from hvd_bert.tasks.inputs import digest_of as tokenizer_digest

# Keys of a configuration that differ between copies of the same model.
NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")


def answer_file(flags: argparse.Namespace, world: World) -> None:
    """Answer --input and write --output. A collective."""
    if world.device.type == "cpu":
        keep_memory()
    with world.raise_on_all_ranks():
        qa = load_model(flags, device=world.device)
        source = open_input(flags, qa)
        questions = source.questions()
    run = identity_of(qa, source)
    world.check_same(run)
    parts = list(blocks(questions))
    unfinished: Unfinished | None = None
    with _writing(flags, world, EXIT_BAD_INPUT):
        if world.rank == 0:
            unfinished = Unfinished(flags.output, run)
    done: set[int] = world.broadcast(unfinished.done if unfinished else None)
    answered = sum(len(parts[number]) for number in done)
    if done:
        log.info("Resuming: %d of %d questions are answered.", answered, len(questions))
    todo = sorted(set(range(len(parts))) - done, key=lambda number: -sum(len(q.context) for q in parts[number]))
    quiet = world.rank > 0 or not sys.stderr.isatty()
    with tqdm(total=len(questions), initial=answered, desc="Answering", unit="question", disable=quiet) as bar:
        for first in range(0, len(todo), world.size):
            mine = todo[first + world.rank :][:1]  # in the last round, some ranks may have none
            found: list[tuple[int, list[Row]]] = []
            with world.raise_on_all_ranks(EXIT_FAILURE):
                found = [(number, rows_of(parts[number], qa)) for number in mine]
            gathered = [pair for pairs in world.gather(found) for pair in pairs]
            with _writing(flags, world):
                for number, rows in gathered:  # on rank 0
                    assert unfinished
                    unfinished.add(number, rows)
                    bar.update(len(rows))
    with _writing(flags, world):
        if unfinished:
            unfinished.finish()
    log.info("%s: %d question(s) answered", flags.output, len(questions))


@contextmanager
def _writing(flags: argparse.Namespace, world: World, status: int = EXIT_FAILURE) -> Iterator[None]:
    with world.raise_on_all_ranks(status), writing_to("--output", flags.output):
        yield


def rows_of(questions: list[Question], qa: QuestionAnswerer) -> list[Row]:
    """The answers to a block as rows of the output."""
    answers = (FoundAnswer.of(answer) for answer in qa.answers_of_block(questions))
    return [_row(question.id, answer) for question, answer in zip(questions, answers, strict=True)]


def _row(question_id: str, answer: FoundAnswer) -> Row:
    nbest = [asdict(candidate) for candidate in answer.nbest]
    for entry in nbest:
        entry["probability"] = entry.pop("score")
    return {
        "id": question_id,
        "answer": answer.text,
        "start": answer.start,
        "end": answer.end,
        "probability": answer.score,
        "null_odds": answer.null_odds,
        "nbest": nbest,
    }


def identity_of(qa: QuestionAnswerer, source: Source) -> dict[str, str]:
    """Everything that the answers and their blocks depend on, by the words that name it in a message."""
    limits = {"blocks": (answerer.BLOCK_QUESTIONS, answerer.BLOCK_CHARACTERS)}
    settings = asdict(qa.window_options) | asdict(qa.span_options) | {"precision": qa.precision} | limits
    return {
        "the model": digest_of(qa.model)[:16],
        "the tokenizer": tokenizer_digest(qa.tokenizer),
        "the input": source.digest[:16],
        "a setting": json.dumps(settings),
    }


def digest_of(model: PreTrainedModel) -> str:
    """SHA-256 of a model's configuration and weights."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weights in model.state_dict().items():
        digest.update(name.encode())
        digest.update(weights.cpu().contiguous().numpy())
    return digest.hexdigest()
