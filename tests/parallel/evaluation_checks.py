"""Checks of evaluations on several ranks: each question is scored exactly once."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Ranks, call, check, expensive
from training_checks import sample

from hvd_bert.config import command_line
from hvd_bert.config.settings import PACKAGE, save
from hvd_bert.data.sources import squad
from hvd_bert.distributed.world import World
from hvd_bert.tasks.base import load_task
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.tools.evaluate.__main__ import main as evaluate
from hvd_bert.training.api import main as train

NUM_QUESTIONS = (3, 10)  # fewer questions than four ranks; not divisible by 4
PRESETS = ("sample", "sample_v2")


def evaluation_name(preset: str, num_questions: int) -> str:
    """Return the name of an evaluation's file, which test_worlds.py reads."""
    return f"evaluation-{preset}-{num_questions}.json"


def _evaluate(ranks: Ranks, preset: str, num_questions: int) -> None:
    world, tiny = ranks.world, Path(sys.argv[1]) / "tiny"
    words = ["--config", preset, "--config_name", tiny, "--tokenizer_name", tiny, "--max_train_samples", 16]
    # Use short windows, so that most questions have several windows.
    words += ["--max_eval_samples", num_questions, "--max_seq_length", 24, "--doc_stride", 4]
    words += ["--per_device_eval_batch_size", 4, "--n_best_size", 5]
    config = command_line.parse([str(word) for word in words])
    task = QuestionAnswering(config, world)
    assert task.dev is not None
    questions = task.dev.questions
    assert len(task.dev.windows) > num_questions == len(questions)
    task.model.train()
    evaluation = task.evaluate(task.model)
    answers = evaluation.outputs
    assert task.model.training, "an evaluation must not change the mode of the model"
    assert world.allgather(evaluation.metrics) == [evaluation.metrics] * world.size
    assert evaluation.metrics["total"] == num_questions
    if world.rank > 0:
        assert answers is None
        return
    assert [answer.id for answer in answers] == [question.id for question in questions]
    assert all((answer.null_odds is not None) == (preset == "sample_v2") for answer in answers)
    written = {
        "metrics": evaluation.metrics,
        "predictions": {answer.id: answer.text for answer in answers},
        "best_spans": {answer.id: answer.best_span for answer in answers},
        "null_odds": {answer.id: answer.null_odds for answer in answers},
        "nbest": {answer.id: [candidate.text for candidate in answer.nbest] for answer in answers},
    }
    (ranks.folder / evaluation_name(preset, num_questions)).write_text(json.dumps(written), encoding="utf-8")


@check
def each_question_is_evaluated_once(ranks: Ranks) -> None:
    for preset in PRESETS:
        for num_questions in NUM_QUESTIONS:
            _evaluate(ranks, preset, num_questions)


def dev_rows(count: int) -> list[dict[str, Any]]:
    """Return the first `count` questions of the sample's dev set as flat rows."""
    questions = squad.open_file(PACKAGE / "sample" / "dev-v1.1.json.gz", False).questions()[:count]
    return [asdict(q) | {"answers": {"text": q.answer_texts, "answer_start": q.answer_starts}} for q in questions]


@check
def files_are_mixed_by_weight_and_scored_separately(ranks: Ranks) -> None:
    world, files = ranks.world, [ranks.folder / f"{name}.json" for name in "abcd"]
    if world.rank == 0:
        for file, part in zip(files, (slice(6), slice(6, 11), slice(6), slice(6, 16)), strict=True):
            file.write_text(json.dumps(dev_rows(16)[part]))
    world.allgather(None)
    a, b, c, d = files
    words = sample("--train_file", f"{a}:0.5", f"{b}:2", "--validation_file", f"C={c}", f"D={d}")
    words += [f"--per_device_train_batch_size={8 // world.size}", "--per_device_eval_batch_size=4"]
    task = load_task(command_line.parse(words), world)
    one = load_task(command_line.parse([*words, "--per_device_train_batch_size=8"]), World())
    assert isinstance(task, QuestionAnswering) and task.plan and one.plan and task.train
    assert (task.plan.num_windows, task.plan.steps_per_epoch) == (3 + 10, 2)
    counts = np.zeros(11, np.int64)
    for step in range(8):  # four epochs
        mine = np.concatenate(task.plan.rank_windows(step, world.rank))
        taken = np.concatenate(world.allgather(mine))
        np.testing.assert_array_equal(np.sort(taken), np.sort(one.plan.step_windows(step)))
        counts += np.bincount(taken, minlength=11)
        if step % 4 == 3:
            assert counts.tolist() == [(step + 1) // 4] * 6 + [step + 1] * 5
    assert len(set(task.window_names(np.arange(11)))) == 11
    found = task.evaluate(task.model).metrics
    for name, file in (("C", c), ("D", d)):
        alone = load_task(command_line.parse(command_line.override_argv(words, [f"--validation_file={file}"])), world)
        assert isinstance(alone, QuestionAnswering)
        scores = alone.evaluate(task.model).metrics
        assert all(scores[key] == found[f"{name}_{key}"] for key in ("exact_match", "f1", "total")) and scores["f1"] > 0


@check
def questions_with_mistakes_are_left_out_on_all_ranks(ranks: Ranks) -> None:
    world, file = ranks.world, ranks.folder / "mistakes.json"
    if world.rank == 0:
        rows = dev_rows(12)
        rows[3]["answers"]["answer_start"] = [start + 1 for start in rows[3]["answer_starts"]]
        file.write_text(json.dumps(rows))
    world.allgather(None)
    words = sample("--train_file", file, "--validation_file", file, "--bad_examples", "skip")
    task = load_task(command_line.parse([*words, f"--per_device_train_batch_size={8 // world.size}"]), world)
    assert isinstance(task, QuestionAnswering) and task.train
    windows = [row.tolist() for row in task.train.windows.lists("input_ids", range(11))]
    assert world.allgather(windows) == [windows] * world.size and len(task.train.windows) == 11
    found = {
        name: {"left_out": left_out, "mistakes": {"misplaced answer": 1}}
        for name, left_out in (("training", 1), ("validation", 0))
    }
    assert task.facts()["bad_examples"] == found
    assert task.evaluate(task.model).metrics["total"] == 12


@expensive
@check
def command_evaluate_gives_the_scores_of_the_trainer_and_of_one_rank(ranks: Ranks) -> None:
    world, model, out = ranks.world, ranks.folder / "evaluated", ranks.folder / "scores"
    tiny = ["--config_name", str(ranks.folder / "tiny"), "--tokenizer_name", str(ranks.folder / "tiny")]
    if world.rank == 0:
        config = command_line.parse(["--config", "sample_v2", *tiny])
        model.mkdir()
        QuestionAnswering(config, world).save(model)
        save(config.as_flat(), model / "train_config.yaml")
    world.allgather(None)
    few = ["--max_eval_samples", 10, "--max_seq_length", 24, "--doc_stride", 4]
    call(evaluate, world, [model, *few, "--output_dir", out])
    trained = ["--config", model / "train_config.yaml", "--model_name_or_path", model, "--no_do_train"]
    call(train, world, [*trained, *few, "--output_dir", ranks.folder / "scores_of_train"])
    if world.rank > 0:
        return
    alone = World()
    alone.set_up_device()
    call(evaluate, alone, [model, *few, "--json", ranks.folder / "alone.json"])
    found, of_one = (json.loads(path.read_text()) for path in (out / "evaluation.json", ranks.folder / "alone.json"))
    assert found["metrics"] == json.loads((ranks.folder / "scores_of_train" / "eval_results.json").read_text())
    assert found["metrics"] == pytest.approx(of_one["metrics"], rel=1e-6)
    assert found["slices"] == of_one["slices"] and len(found["slices"]) == 4
    wrong, wrong_of_one = ({mistake["id"] for mistake in results["mistakes"]} for results in (found, of_one))
    assert wrong == wrong_of_one != set()
