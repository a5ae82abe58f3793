"""Custom tasks on several ranks. test_worlds.py compares the worlds' losses and scores."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import resuming
from ranks import Ranks, call, check, check_every_strategy, expensive
from resume_checks import run
from stopping_at import signal_at
from training_checks import GLOBAL_BATCH, sample

from hvd_bert.config.command_line import drop_flags, override_argv
from hvd_bert.distributed.launch import Launcher
from hvd_bert.errors import EXIT_STOPPED
from hvd_bert.predict.__main__ import parse_flags
from hvd_bert.predict.rows import predict_file
from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.training import api

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from distillation import Distillation  # noqa: E402  # in the folder above

TASK = "text_classification:TextClassification"
TEXTS = 17  # the second step of an epoch has only one text
STEPS = 5
PASSAGE = "The box in the hall is red. What colour is the green house, and where did it stand?"
COLOURS = ("red", "green", "pale grey")


def rows(count: int) -> list[dict[str, str]]:
    """Make rows with pairs of texts of different lengths. The label is the beginning of the second text."""
    return [
        {"sentence1": PASSAGE[: 5 * i], "sentence2": COLOURS[i % 3] + PASSAGE[: 7 * i % 29], "label": COLOURS[i % 3]}
        for i in range(1, count + 1)
    ]


def flags(ranks: Ranks, out: str) -> list[str]:
    folder, world = ranks.folder, ranks.world
    if world.rank == 0:
        for name, count in (("train", TEXTS), ("dev", 10)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    world.allgather(None)
    strategy, _, stage = sys.argv[3].partition(":")
    words = [f"--task={TASK}", f"--strategy={strategy}", *([f"--zero_stage={stage}"] if stage else [])]
    words += [f"--train_file={folder}/train.jsonl", f"--validation_file={folder}/dev.jsonl", "--max_seq_length=64"]
    words += [f"--config_name={folder}/tiny", f"--tokenizer_name={folder}/tiny", "--dropout=0"]
    words += [f"--per_device_train_batch_size={GLOBAL_BATCH // world.size}", f"--max_steps={STEPS}"]
    words += ["--learning_rate=1e-3", "--warmup_ratio=0", "--eval_steps=3", "--save_steps=3", "--logging_steps=1"]
    return [*words, *(["--deterministic"] if world.size > 2 else []), f"--output_dir={folder / out}"]


@check_every_strategy
def classification_ends_well(ranks: Ranks) -> None:
    assert run(ranks.world, flags(ranks, "classified")) == 0


@check_every_strategy
def work_equals_that_of_one_process(ranks: Ranks) -> None:
    """Check steps with different numbers of windows per rank in bf16.

    In one world per strategy, also check several micro-batches in fp32; with Horovod, also a custom task.
    """
    uneven = ["--per_device_train_batch_size", 2, "--global_batch", 2 * ranks.world.size - 1, "--max_grad_norm", 0.01]
    call(doctor.prove, ranks.world, ["--prove", *sample(*uneven, "--bf16", "--dropout", 0.1)])
    if not ranks.runs_expensive_checks:
        return
    accumulated = ["--gradient_accumulation_steps", 2, "--per_device_train_batch_size", 2, "--dropout", 0.1]
    call(doctor.prove, ranks.world, ["--prove", *sample(*accumulated)])
    if ranks.strategy != "horovod":
        return
    left_out = ("max_steps", "eval_steps", "save_steps", "logging_steps", "output_dir")
    words = drop_flags(flags(ranks, "unused"), left_out)
    call(doctor.prove, ranks.world, ["--prove", *override_argv(words, ["--dropout=0.1"])])


@expensive
@check
def stopped_classification_equals_an_uninterrupted_run(ranks: Ranks) -> None:
    words = flags(ranks, "stopped_texts")
    with signal_at(4, {ranks.world.size - 1}, "SIGTERM"):
        assert run(ranks.world, words) == EXIT_STOPPED
    assert run(ranks.world, words) == 0
    if ranks.world.rank == 0:
        assert resuming.differences(ranks.folder / "classified", ranks.folder / "stopped_texts") == []


@expensive
@check
def texts_of_a_file_are_predicted(ranks: Ranks) -> None:
    """The predictions equal those of the training's last evaluation."""
    folder, world = ranks.folder, ranks.world
    words = [folder / "classified", "--input", folder / "dev.jsonl", "--output", folder / "predicted_texts.jsonl"]
    arguments = parse_flags([str(word) for word in words], Launcher("test", world.size, world.rank))
    arguments.strategy = "none" if world.size == 1 else "ddp"
    predict_file(arguments, TASK, world)
    if world.rank == 0:
        found = [json.loads(line) for line in (folder / "predicted_texts.jsonl").read_text().splitlines()]
        evaluated = json.loads((folder / "classified" / "eval_predictions.json").read_text())
        assert [row["prediction"] for row in found] == evaluated["prediction"]
        assert [row["probability"] for row in found] == pytest.approx(evaluated["probability"], abs=1e-5)
        assert [{name: row[name] for name in ("sentence1", "sentence2", "label")} for row in found] == rows(10)


@check
def custom_task_ends_well(ranks: Ranks) -> None:
    """Train an epoch of examples/mnist_rnn.py, whose model is an LSTM and has neither tokens nor layers."""
    strategy, _, stage = sys.argv[3].partition(":")
    words = ["--config", str(EXAMPLES / "mnist_rnn.yaml"), "--num_train_epochs=1", "--logging_steps=1"]
    words += [f"--strategy={strategy}", *([f"--zero_stage={stage}"] if stage else []), "--eval_strategy=no"]
    words += [f"--output_dir={ranks.folder / 'digits'}", f"--per_device_train_batch_size={64 // ranks.world.size}"]
    assert run(ranks.world, words) == 0


@check_every_strategy
def distillation_ends_well(ranks: Ranks) -> None:
    """Distil the model of `whole_run_ends_well` into a new one."""
    Distillation.teacher_name = str(ranks.folder / "run")
    words = ["--per_device_train_batch_size", GLOBAL_BATCH // ranks.world.size, "--seed", 2, "--max_steps", STEPS]
    words += ["--logging_steps", 1, "--max_eval_samples", 5, "--output_dir", ranks.folder / "distilled"]
    api.run(sample(*words), ranks.world, own=Distillation)


@check
def several_answers_end_well(ranks: Ranks) -> None:
    folder, texts = ranks.folder, ("red", "green")
    if ranks.world.rank == 0:
        lists = [
            {"question": "What colour?", "context": PASSAGE * (1 + i % 2)}
            | {"answers": {"text": texts[: i % 3], "answer_start": [*map(PASSAGE.index, texts)][: i % 3]}}
            for i in range(TEXTS)
        ]
        (folder / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
    ranks.world.allgather(None)
    words = ["--task=several_answers:SeveralAnswers", "--max_seq_length=32"]
    words += [f"--{name}_file={folder}/lists.jsonl" for name in ("train", "validation")]
    assert run(ranks.world, override_argv(flags(ranks, "several"), words)) == 0
