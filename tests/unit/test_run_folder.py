"""The files of a run: they are complete, and all in the list that the next run replaces."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, BertConfig, BertForQuestionAnswering

from hvd_bert.evaluation.postprocess import Answer, Candidate
from hvd_bert.output import run_folder
from hvd_bert.tasks import question_answering
from hvd_bert.tasks.base import EvaluationResult
from hvd_bert.tasks.question_answering import QuestionAnswering


def answer(number: int, odds: float | None) -> Answer:
    chosen = Candidate(f"text {number}", 0, 6, probability=1.0, start_logit=2.0, end_logit=3.0)
    return Answer(**vars(chosen), id=f"q{number}", null_odds=odds, nbest=(chosen,))


@pytest.mark.parametrize("v2", [False, True], ids=["v1.1", "v2.0"])
def test_evaluation_files(tmp_path, v2):
    metrics = {"exact_match": 50.0, "f1": 60.0, "eval_loss": 1.5}
    (tmp_path / "eval_null_odds.json").write_text("{}")  # of an earlier evaluation
    answers = [answer(n, n - 0.5 if v2 else None) for n in range(3)]
    run_folder.write_evaluation(tmp_path, EvaluationResult(metrics, "", question_answering.files(answers)))
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert found.pop("eval_null_odds.json", None) == ({"q0": -0.5, "q1": 0.5, "q2": 1.5} if v2 else None)
    assert found == {
        "eval_results.json": metrics,
        "eval_predictions.json": {f"q{n}": f"text {n}" for n in range(3)},
        "eval_nbest_predictions.json": {
            f"q{n}": [{"text": f"text {n}", "start_logit": 2.0, "end_logit": 3.0, "probability": 1.0}] for n in range(3)
        },
    }
    assert set(os.listdir(tmp_path)) <= run_folder.RUN_FILES.keys()  # or the next run would not replace it


def model_of(tokenizer: Any) -> BertForQuestionAnswering:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForQuestionAnswering(BertConfig(vocab_size=len(tokenizer), **sizes))


def task_of(model: BertForQuestionAnswering, tokenizer: Any) -> QuestionAnswering:
    task = QuestionAnswering.__new__(QuestionAnswering)
    task.model, task.tokenizer = model, tokenizer
    return task


def test_saved_model_is_loaded_by_transformers(tmp_path, tokenizer):
    model = model_of(tokenizer)
    run_folder.save_model(tmp_path, task_of(model, tokenizer))
    assert set(os.listdir(tmp_path)) <= run_folder.RUN_FILES.keys()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # readable as the umask allows
    loaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path).state_dict()
    assert all(value.equal(loaded[name]) for name, value in model.state_dict().items())
    text = "what colour is the box?"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer(text)["input_ids"]
