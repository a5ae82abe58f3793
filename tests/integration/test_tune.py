"""Test `hvd-bert tune` on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import TIMEOUT_S, environment, launcher, programs, run, served
from processes import started

pytestmark = pytest.mark.integration
pytest.importorskip("optuna")


def test_a_search_is_killed_and_resumed(tmp_path: Path) -> None:
    """The pruner ends at least one trial early."""
    launcher(2, "gloo")  # skips the test if the launcher is missing
    words = [sys.executable, "-m", "hvd_bert.tools.tune", "--ranks", "2", "--config", "sample", "--trials", "4"]
    words += ["--max_train_samples", "300", "--max_eval_samples", "20", "--metric_for_best_model", "eval_loss"]
    words += ["--num_train_epochs", "12", "--range", "learning_rate=1e-5:2e-3:log", "--pruner", "halving"]
    words += ["--seed", "45"]  # with this seed, the first learning rate is higher and better than the second
    env = environment() | {"PATH": f"{programs()}:{os.environ['PATH']}"}
    command = [served(word) for word in words]
    with started(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("    1  "):
            assert process.poll() is None
        process.kill()
    outcome = run(words, tmp_path, timeout=2 * TIMEOUT_S).expect(0)
    out = tmp_path / "runs" / "tune"
    assert "ended early" in (out / "tune.html").read_text(), outcome
    result = json.loads((out / "tune.json").read_text())["result"]
    assert ("Keep your settings" in outcome.output) == (result["set"] == []), outcome
    assert len([*out.rglob("model.safetensors")]) == 1, outcome
    assert "2 of 4 trials are done" in outcome.output, outcome
    assert len(re.findall(r"^ {4}\d  ", outcome.output, re.M)) == 2, outcome
