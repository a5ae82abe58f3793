"""Short campaigns of interrupted runs, and how a training's time splits into useful and lost time."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from campaign_goodput import LOST, PARTS, Training, account
from commands import read_lines
from launch import REPOSITORY, run

PROGRAM = [sys.executable, REPOSITORY / "benchmarks" / "campaign.py"]


@pytest.mark.campaign
@pytest.mark.parametrize(("campaign", "number"), [("stops", 3), ("rank_kills", 2), ("kills", 10)])
def test_interrupted_runs_equal_uninterrupted_ones(tmp_path: Path, campaign: str, number: int) -> None:
    words = [*PROGRAM, campaign, "--number", str(number), "--out", tmp_path / "out"]
    run(words, tmp_path, timeout=900, cold=True).expect(0)


@pytest.mark.campaign
def test_goodput_agrees_with_the_notes(tmp_path: Path) -> None:
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
        assert row["windows_per_s"] * 50 == pytest.approx(last // 3 * 33 + last % 3 * 16)  # windows per step: 16, 16, 1
        assert any("next_step_s" in kill for kill in row["kills"]) and row["kills"][0]["detection_s"] > 0
        assert sum(kill["repeated_steps"] for kill in row["kills"]) == steps.total() - len(steps)
        assert sum(row["spent"].values()) == pytest.approx(50)


def notes(*rows: str) -> list[dict[str, Any]]:
    """Make notes from rows "TIME EVENT", or "TIME step NUMBER"."""
    split = [row.split() for row in rows]
    return [{"time": float(time), "what": what, "step": int(*number), "windows": 5} for time, what, *number in split]


def test_lost_time_is_divided_into_parts() -> None:
    first = ("100 started", "110 begin", "112 step 1", "114 step 2", "115 kill")
    cases = {
        # The first restart, from step 1, is killed before it trains; the second restart repeats step 2.
        ("116 ended", "118 kill", "119 ended", "125 begin", "127 step 2", "129 step 3"): [(1, 2, 1), (1, 6, 2)],
        # The run resumes from memory after a surviving rank finished step 3; later, a new rank joins.
        ("116 step 3", "117 noticed", "118 begin", "120 step 4", "121 noticed", "123 begin"): [(1, 4, 0)],
        # No rank notices the kill, and the launcher starts new ranks.
        ("118 started", "119 begin", "120 step 3"): [(3, 1, 1)],
    }
    for rows, expected in cases.items():
        before, *kills = found = account(notes(*first, *rows), global_batch=2, duration_s=20)
        assert [tuple(kill[part] for part in LOST) for kill in kills] == expected, rows
        assert sum(row[part] for row in found for part in PARTS) == pytest.approx(20)
    assert [before["windows"], kills[0]["windows"], kills[0]["next_step_s"]] == [4, 1, 5]  # windows per step: 2, 2, 1


def test_a_training_that_does_not_start_ends(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo waiting; sleep 600"]
    training = Training(command, tmp_path / "log", tmp_path / "notes", kills=[], duration=600, start_s=0.5)
    with pytest.raises(SystemExit, match="waiting"):
        training.run()
