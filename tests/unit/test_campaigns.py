"""Short forms of the campaign of interrupted runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import REPOSITORY, run


@pytest.mark.campaign
@pytest.mark.parametrize("campaign", [["resumes", "--resumes", "3"], ["kills", "--minutes", "3"]], ids=str)
def test_interrupted_runs_equal_uninterrupted_ones(tmp_path: Path, campaign: list[str]) -> None:
    program = REPOSITORY / "benchmarks" / "long_runs.py"
    run([sys.executable, program, *campaign, "--out", tmp_path / "out"], tmp_path, timeout=900, cold=True).expect(0)
