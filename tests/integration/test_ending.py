"""How a rank's process ends when all is done."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import launcher, run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("by", "strategy", "ends"),
    [("mpi", "horovod", True), ("mpi", "ddp", False), ("torchrun", "ddp", False)],
)
def test_rank_finishes_what_it_began(tmp_path: Path, by: str, strategy: str, ends: bool) -> None:
    """Beside threads of torch's Gloo, Python must not take itself apart: they abort the process (pytorch#190489)."""
    worker = Path(__file__).with_name("ending.py")
    run([*launcher(2, by), sys.executable, str(worker), str(tmp_path), strategy], tmp_path).expect(0)
    for rank in range(2):
        ended = ["thread", "atexit", *(["taken apart"] if ends else [])]
        assert (tmp_path / f"rank{rank}").read_text().splitlines() == ended
