"""The input of all variants of compare_peers.py: one model, and the same windows in the order of the batch plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from shared import peer_columns

from hvd_bert.config.command_line import parse
from hvd_bert.data.sources.squad import Question
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.tasks.question_answering import QuestionAnswering

LEARNING_RATE = 5e-5


@dataclass(frozen=True)
class Work:
    """The same work as this trainer reads it (`train_file`, `max_samples`) and as the peers do.

    `model`: a folder, with the span head; `windows`, `padded_windows`: tables as run_qa's tokenization makes them, in
    the order of the batch plan of `seed`; `rank_batch`: windows per rank.
    """

    train_file: Path
    max_samples: int | None
    max_seq_length: int
    rank_batch: int
    seed: int
    model: Path
    windows: Path
    padded_windows: Path
    num_windows: int
    mean_tokens: float


def our_flags(train_file: Path, model: str, max_seq_length: int, rank_batch: int, seed: int) -> list[str]:
    """The trainer's flags, except for numbers of steps and questions, and the output folder."""
    flags = ["--model_name_or_path", model, "--train_file", str(train_file), "--no_do_eval", "--seed", str(seed)]
    flags += ["--per_device_train_batch_size", str(rank_batch), "--learning_rate", str(LEARNING_RATE)]
    flags += ["--warmup_ratio", "0"]  # as the peers
    flags += ["--max_seq_length", str(max_seq_length), "--doc_stride", str(min(128, max_seq_length // 3))]
    return [*flags, "--eval_strategy", "no", "--save_steps", "0"]


def prepare(args: argparse.Namespace) -> tuple[Work, Work]:
    """The work of the preflight, without dropout, and the timed work. Raises UserError for too little data."""
    length, rank_batch = args.max_seq_length, args.per_device_train_batch_size
    task, max_samples = _load(args, args.train_file, length, rank_batch), None
    assert task.train and task.plan
    preflight_file, preflight_length, preflight_batch = _preflight_data(args, task)
    if args.max_windows is not None and args.max_windows < task.plan.num_windows:
        # The trainer counts in questions: those of which all windows are among the first.
        max_samples = max(1, int(task.train.windows.column("question")[args.max_windows]))
        task = _load(args, args.train_file, length, rank_batch, "--max_train_samples", str(max_samples))
    timed = _lay_out(args.out / "timed", task, args.train_file, max_samples, length, rank_batch, args.seed)
    needed = args.ranks * rank_batch * (args.warmup + max(args.steps, args.padded_steps))
    if timed.num_windows < needed:
        raise UserError(
            f"--train_file {args.train_file}: it has {timed.num_windows} windows, and warm-up and timed steps need"
            f" {needed}. Use more questions or fewer --steps."
        )
    task = _load(args, preflight_file, preflight_length, preflight_batch, "--dropout", "0")
    folder = args.out / "preflight"
    preflight = _lay_out(folder, task, preflight_file, None, preflight_length, preflight_batch, args.seed)
    return preflight, timed


def _load(args: argparse.Namespace, train_file: Path, length: int, rank_batch: int, *flags: str) -> QuestionAnswering:
    config = parse([*our_flags(train_file, args.model_name_or_path, length, rank_batch, args.seed), *flags])
    world = World()
    world.size = args.ranks  # the plan depends on it; loading does not communicate
    return QuestionAnswering(config, world)


def _preflight_data(args: argparse.Namespace, task: QuestionAnswering) -> tuple[Path, int, int]:
    """Questions of one window each, all of one length: their file, the length, and the windows per rank.

    All variants have the same loss only without padding, since the softmax of BertForQuestionAnswering over the
    positions of a window includes its padding.
    """
    assert task.train and task.plan
    table, lengths = task.train.windows, task.train.windows.lengths
    numbers = table.column("question")
    single = np.bincount(numbers)[numbers] == 1
    length = int(np.bincount(lengths[single]).argmax()) if single.any() else 0
    chosen = numbers[single & (lengths == length)]
    batch = min(args.per_device_train_batch_size, len(chosen) // (args.ranks * args.preflight_steps))
    if batch < 1:
        raise UserError(
            f"--train_file {args.train_file}: it has {len(chosen)} windows of one length ({length} tokens), and the"
            f" preflight needs {args.ranks * args.preflight_steps}. Use more questions or fewer --preflight_steps."
        )
    questions = task.train.source.questions()
    path = args.out / "preflight.json"
    path.write_text(json.dumps({"data": [_article(questions[number]) for number in chosen]}))
    return path, length, batch


def _article(question: Question) -> dict[str, Any]:
    answers = [
        {"text": text, "answer_start": start}
        for text, start in zip(question.answer_texts, question.answer_starts, strict=True)
    ]
    asked = {"id": question.id, "question": question.question, "answers": answers}
    return {"title": question.title, "paragraphs": [{"context": question.context, "qas": [asked]}]}


def _lay_out(
    folder: Path,
    task: QuestionAnswering,
    train_file: Path,
    max_samples: int | None,
    length: int,
    rank_batch: int,
    seed: int,
) -> Work:
    """Write what the variants read to `folder`."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    assert task.train and task.plan
    plan = task.plan
    order = np.concatenate([plan.step_windows(step) for step in range(plan.steps_per_epoch)])
    rows = pa.Table.from_batches(task.train.windows.batches).take(order).to_pydict()
    lengths = [len(tokens) for tokens in rows["input_ids"]]
    features = peer_columns(*(rows[name] for name in ("input_ids", "context_start", "start_position", "end_position")))
    Dataset.from_dict(features).save_to_disk(folder / "windows")
    padded = task.tokenizer.pad(features, padding="max_length", max_length=length)
    Dataset.from_dict(dict(padded)).save_to_disk(folder / "padded_windows")
    task.save(folder / "model")
    model, tables = folder / "model", (folder / "windows", folder / "padded_windows")
    mean = sum(lengths) / len(lengths)
    return Work(train_file, max_samples, length, rank_batch, seed, model, *tables, len(lengths), mean)
