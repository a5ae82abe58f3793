"""`hvd-bert doctor --prove` finds every wrong training of mutations.py; task_checks.py proves correct trainings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launch import TIMEOUT_S, launcher, run

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("stride", [12, pytest.param(1, marks=pytest.mark.campaign)])
def test_every_mutation_is_found(tmp_path: Path, stride: int) -> None:
    command = [*launcher(2, "mpirun"), sys.executable, Path(__file__).with_name("mutations.py"), tmp_path, stride]
    outcome = run(command, tmp_path, env={"HVD_BERT_CACHE": str(tmp_path / "cache")}, timeout=5 * TIMEOUT_S).expect(1)
    assert "Not proved: Steps, Gradients" in outcome.output, outcome
    found = json.loads((tmp_path / "found.json").read_text())
    correct = found.pop("none: rank 0, step 1")
    assert not correct["failures"] and len(found) == -(-100 // stride)
    assert [name for name, result in found.items() if not (result["changed"] and result["failures"])] == []


def test_no_false_alarm_in_bf16_on_three_ranks(tmp_path: Path) -> None:
    """With three ranks, the factor that scales losses is not a power of 2, so bf16 rounds the gradients differently."""
    command = [*launcher(3, "mpirun"), sys.executable, "-m", "hvd_bert", "doctor", "--prove", "--bf16"]
    run(command, tmp_path, env={"HVD_BERT_CACHE": str(tmp_path / "cache")}).expect(0)
