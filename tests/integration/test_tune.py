"""`hvd-bert tune` with real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import documented
import pytest
import yaml
from launch import TIMEOUT_S, environment, launcher, programs, run, served
from processes import started

pytestmark = pytest.mark.integration
pytest.importorskip("optuna")
TUNE = (sys.executable, "-m", "hvd_bert.tools.tune", "--ranks", "2")


def test_horovods_settings_on_two_ranks(tmp_path: Path) -> None:
    """The shortest runs of a task of one's own: there is an answer, and every run has its pair's setting."""
    (tmp_path / "digits.py").write_text(documented.own_task())
    launcher(2, "gloo")  # skips if there is no launcher
    words = [*TUNE, "--range", "fp16", "--pairs", "1", "--steps", "2", "--task", "digits:Digits", "--num_groups", "8"]
    env = {"CUDA_VISIBLE_DEVICES": "", "HOROVOD_CYCLE_TIME": "2"}
    outcome = run(words, tmp_path, env=env, timeout=2 * TIMEOUT_S).expect(0)
    assert "failed" not in outcome.output, outcome
    assert ("Keep the defaults" in outcome.output) != ("Set this: it gains" in outcome.output), outcome
    out = tmp_path / "runs" / "tune"
    record = json.loads((out / "tune.json").read_text())
    assert record["same"]["HOROVOD_... in the environment"] == {"HOROVOD_CYCLE_TIME": "2"}
    for role, fp16 in (("candidate", True), ("baseline", False)):
        settings = yaml.safe_load((out / "pair-001" / role / "train_config.yaml").read_text())
        assert (settings["num_groups"], settings["fp16_allreduce"]) == (8, fp16), outcome
        assert json.loads((out / "pair-001" / role / "train_results.json").read_text())["world_size"] == 2


def test_a_search_over_the_training_is_killed_and_resumed(tmp_path: Path) -> None:
    """Trials on two ranks, one of which is ended early."""
    launcher(2, "gloo")
    words = [*TUNE, "--space", "training", "--config", "sample", "--num_train_epochs", "12", "--trials", "4"]
    words += ["--max_train_samples", "300", "--max_eval_samples", "20", "--metric_for_best_model", "eval_loss"]
    words += ["--range", "learning_rate=1e-5:2e-3:log", "--pruner", "halving"]
    words += ["--seed", "45"]  # whose first learning rate is the best
    env = environment() | {"PATH": f"{programs()}:{os.environ['PATH']}"}
    command = [served(word) for word in words]
    with started(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
        while not process.stdout.readline().startswith("    1  "):
            assert process.poll() is None
        process.kill()
    outcome = run(words, tmp_path, timeout=2 * TIMEOUT_S).expect(0)
    assert "2 of 4 trials are done" in outcome.output and "ended early" in outcome.output, outcome
