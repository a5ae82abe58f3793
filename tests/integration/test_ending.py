"""The end of a rank's process after success, or after an error of all ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import said
from launch import launcher, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("by", "strategy", "taken_apart", "status"),
    [("mpirun", "horovod", True, 0), ("mpirun", "fsdp", False, 75), ("torchrun", "ddp", False, 0)],
)
def test_rank_finishes_what_it_began(tmp_path: Path, by: str, strategy: str, taken_apart: bool, status: int) -> None:
    """Python must not be finalized alongside threads of torch's Gloo: they abort the process (pytorch#190489)."""
    worker = Path(__file__).with_name("ending.py")
    words = [*launcher(2, by), sys.executable, worker, tmp_path, strategy, *([status] if status else [])]
    outcome = run(map(str, words), tmp_path, cold=True)
    if by == "mpirun":
        outcome.expect(status)  # torchrun's own status is 1 for any failed rank
    assert not outcome.hung and bool(outcome.status) == bool(status), outcome
    assert said(outcome).count("hvd_bert: all know it") == bool(status), outcome
    for rank in range(2):
        ended = ["thread", "atexit", *(["taken apart"] if taken_apart else [])]
        assert (tmp_path / f"rank{rank}").read_text().splitlines() == ended, outcome
