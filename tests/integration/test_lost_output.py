"""Commands whose standard output gets lost: training completes its files, help ends quietly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import small_run
from launch import run

pytestmark = pytest.mark.integration


def test_training_completes_on_a_full_log_disk(tmp_path: Path) -> None:
    outcome = run(["sh", "-c", 'exec "$@" > /dev/full', "sh", *small_run(1, "out")], tmp_path).expect(0)
    assert outcome.output.count("warning: standard output cannot be written (No space left on device)") == 1, outcome
    assert "Traceback" not in outcome.output, outcome
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6, 6]
    assert (tmp_path / "out/train_results.json").exists() and (tmp_path / "out/eval_results.json").exists()
