"""The files of a run: those of an earlier evaluation go with the next one."""

from __future__ import annotations

import json

from hvd_bert.output import run_folder
from hvd_bert.tasks.base import EvaluationResult


def test_files_of_an_earlier_evaluation_are_removed(tmp_path):
    (tmp_path / "eval_null_odds.json").write_text("{}")
    files = {"eval_predictions.json": {"q0": "red"}}
    run_folder.write_evaluation(tmp_path, EvaluationResult({"f1": 60.0}, "", files))
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert found == files | {"eval_results.json": {"f1": 60.0}}
