"""`hvd-bert bench goodput` with real launches and kills."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import read_lines
from documented import undocumented
from launch import TRAIN, launcher, run

pytestmark = pytest.mark.integration
WINDOWS, GLOBAL_BATCH = 33, 16  # steps of 16, 16 and 1 windows


def measured(out: Path, *flags: object) -> dict[str, Any]:
    """The rows of the record, of trainings of the sample."""
    launcher(2, "gloo")  # skips if there is no launcher
    words = [*TRAIN[:2], "hvd_bert.tools.bench", "goodput", "--out", out, "--global_batch", GLOBAL_BATCH, *flags]
    words += ["--config", "sample", "--max_train_samples", WINDOWS, "--save_steps", 5]
    run([str(word) for word in words], out.parent, timeout=900, cold=True).expect(0)  # not the fork server's children
    record = json.loads((out / "goodput.json").read_text())
    assert undocumented(record, "goodput.json", without=("same",)) == []
    assert (out / "goodput.png").stat().st_size > 0
    rows: dict[str, Any] = record["strategies"]
    return rows


def test_the_record_counts_what_the_notes_hold(tmp_path: Path) -> None:
    flags = "--strategies horovod --every 20 --duration 16 --kill_seed 1"
    (row,) = measured(tmp_path / "out", *flags.split()).values()
    notes = read_lines(tmp_path / "out" / "horovod-killed.jsonl")
    start = next(note["time"] for note in notes if note["what"] == "begin")
    steps = Counter(note["step"] for note in notes if note["what"] == "step" and note["time"] <= start + 16)
    last = max(steps)
    assert row["windows_per_s"] * 16 == pytest.approx(last // 3 * WINDOWS + last % 3 * GLOBAL_BATCH)
    (kill,) = row["kills"]
    assert [note["time"] - start for note in notes if note["what"] == "kill"] == [pytest.approx(kill["at_s"])]
    assert kill["repeated_steps"] == steps.total() - len(steps)
    assert sum(row["spent"].values()) == pytest.approx(16)
    assert kill["detection_s"] == row["spent"]["detection_s"] > 0


@pytest.mark.campaign
def test_all_strategies_recover(tmp_path: Path) -> None:
    rows = measured(tmp_path / "out", "--every", 30, "--duration", 60)
    assert len(rows) == 4
    for row in rows.values():
        assert row["share"] > 0
        assert any("next_step_s" in kill for kill in row["kills"]), row
