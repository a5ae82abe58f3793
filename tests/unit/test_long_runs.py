"""The campaign of long runs: its figures, and a short form of its interrupted runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import long_runs
import pytest
from launch import REPOSITORY, run


def records(**grows: float) -> list[dict[str, Any]]:
    """100 records of a process; `grows`: what each adds to a key."""
    first = {"wall_s": 0.0, "training_cpu_s": 0.0, "cpu_s": 0.0, "rss": 2**28, "open_files": 20, "threads": 9}
    first |= {"fastest_wall_s": 0.016, "fastest_training_cpu_s": 0.004}
    per_record = {"wall_s": 2.0, "training_cpu_s": 0.5, "cpu_s": 0.6} | grows
    return [
        {key: value + per_record.get(key, 0) * number for key, value in first.items()}
        | {"step": number * long_runs.EVERY, "files": {"metrics.jsonl": 7000 * number, "tb": 50}}
        for number in range(101)
    ]


def test_growth_compares_the_second_tenth_with_the_last():
    found = long_runs.growth(records(threads=1))
    assert found["steps"] == [[1000, 2000], [9000, 10000]]
    assert found["training_cpu_ms_per_step"] == {"first": 5.0, "last": 5.0, "growth": 0.0}
    assert found["rss_mib"]["first"] == 256.0 and found["threads"] == [29, 109]
    assert long_runs.log_growth(records()) == {"metrics.jsonl": 70.0}


@pytest.mark.parametrize(
    ("grows", "said"),
    [
        ({}, []),
        ({"rss": 2**20}, ["rank 0: rss_mib grew by 29.5%"]),
        ({"threads": 1}, ["rank 0: threads grew from 29 to 109"]),
        ({"fastest_training_cpu_s": 1e-5}, ["rank 0: fastest_training_cpu_ms_per_step grew by 19.5%"]),
    ],
    ids=str,
)
def test_what_grows_is_reported(grows, said):
    assert long_runs.exceeded({"ranks": [long_runs.growth(records(**grows))]}) == said


def test_the_fastest_block_of_steps_is_recorded(tmp_path, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(long_runs.time, "thread_time", lambda: next(now))
    record = long_runs.Recorder(tmp_path, 1, tmp_path)
    for step in range(1, 2 * long_runs.EVERY + 2):
        if step == 155:
            next(now)  # another program slows a step down
        record(step)
    rows = [json.loads(line) for line in (tmp_path / "rank1.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 100, 200]
    assert [row["fastest_training_cpu_s"] for row in rows[1:]] == [1 / long_runs.BLOCK] * 2


@pytest.mark.campaign
@pytest.mark.parametrize("campaign", [["resumes", "--resumes", "3"], ["kills", "--minutes", "3"]], ids=str)
def test_interrupted_runs_equal_uninterrupted_ones(tmp_path: Path, campaign: list[str]) -> None:
    program = REPOSITORY / "benchmarks" / "long_runs.py"
    run([sys.executable, program, *campaign, "--out", tmp_path / "out"], tmp_path, timeout=900, cold=True).expect(0)
