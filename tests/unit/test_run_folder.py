"""The files of a run: they are complete, and all in the list that the next run replaces."""

from __future__ import annotations

import json
import os

import pytest

from hvd_bert.evaluation.postprocess import Answer, Candidate
from hvd_bert.output import run_folder
from hvd_bert.tasks import question_answering
from hvd_bert.tasks.base import EvaluationResult


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
