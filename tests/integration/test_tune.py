"""`hvd-bert tune` with real ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import documented
import pytest
import yaml
from launch import TIMEOUT_S, launcher, run

pytestmark = pytest.mark.integration


def test_two_ranks_are_tuned(tmp_path: Path) -> None:
    """The shortest runs of a task of one's own: there is an answer, and every run has its pair's setting."""
    (tmp_path / "digits.py").write_text(documented.own_task())
    launcher(2, "gloo")  # skips if there is no launcher
    words = [
        *(sys.executable, "-m", "hvd_bert.tools.tune", "--knobs", "fp16"),
        *("--pairs", "1", "--steps", "2", "--ranks", "2"),
    ]
    words += ["--task", "digits:Digits", "--num_groups", "8"]
    env = {"CUDA_VISIBLE_DEVICES": "", "HOROVOD_CYCLE_TIME": "2"}
    outcome = run(words, tmp_path, env=env, timeout=2 * TIMEOUT_S).expect(0)
    assert "Set by you: HOROVOD_CYCLE_TIME=2 --num_groups=8 (gains are relative to this)" in outcome.output, outcome
    assert ("Keep the defaults" in outcome.output) != ("Set this: it gains" in outcome.output), outcome
    record = json.loads((tmp_path / "runs" / "tune" / "tune.json").read_text())
    assert record["same"]["HOROVOD_... in the environment"] == {"HOROVOD_CYCLE_TIME": "2"}
    pairs = {row["kind"]: row for row in record["pairs"]}
    assert pairs["search"]["candidate"] == ["--fp16_allreduce=True"] and pairs["noise"]["candidate"] == [], outcome
    for row in pairs.values():
        for role in ("candidate", "baseline"):
            folder = tmp_path / "runs" / "tune" / f"pair-{row['number']:03}" / role
            settings = yaml.safe_load((folder / "train_config.yaml").read_text())
            assert (settings["num_groups"], settings["fp16_allreduce"]) == (8, bool(row[role])), outcome
            assert json.loads((folder / "train_results.json").read_text())["world_size"] == 2
