"""Short forms of the campaigns of interrupted runs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from commands import read_lines
from launch import REPOSITORY, run

PROGRAM = [sys.executable, REPOSITORY / "benchmarks" / "campaign.py"]


@pytest.mark.campaign
@pytest.mark.parametrize(("campaign", "number"), [("stops", 3), ("rank_kills", 2), ("kills", 10)])
def test_interrupted_runs_equal_uninterrupted_ones(tmp_path: Path, campaign: str, number: int) -> None:
    words = [*PROGRAM, campaign, "--number", str(number), "--out", tmp_path / "out"]
    run(words, tmp_path, timeout=900, cold=True).expect(0)


@pytest.mark.campaign
def test_goodput_counts_what_the_notes_hold(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--every", 25, "--duration", 50, "--global_batch", 16, "--max_train_samples", 33, "--out", out]
    words += ["--config", "sample", "--save_steps", 5]
    run([*PROGRAM, "goodput", *map(str, words)], tmp_path, timeout=900, cold=True).expect(0)
    rows = json.loads((out / "goodput.json").read_text())["strategies"]
    assert [*rows] == ["elastic", "horovod", "ddp", "fsdp"]
    for name, row in rows.items():
        notes = read_lines(out / f"{name}-killed.jsonl")
        start = next(note["time"] for note in notes if note["what"] == "begin")
        steps = Counter(note["step"] for note in notes if note["what"] == "step" and note["time"] <= start + 50)
        last = max(steps)
        assert row["windows_per_s"] * 50 == pytest.approx(last // 3 * 33 + last % 3 * 16)  # steps of 16, 16 and 1
        assert any("next_step_s" in kill for kill in row["kills"]) and row["kills"][0]["detection_s"] > 0
        assert sum(kill["repeated_steps"] for kill in row["kills"]) == steps.total() - len(steps)
        assert sum(row["spent"].values()) == pytest.approx(50)
