"""A rank that fails alone ends all others and is named."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from commands import said
from launch import launcher, run

pytestmark = pytest.mark.integration

CASES = [
    (*case, "horovod") for case in (("mpirun", "sum"), ("mpi", "allgather"), ("gloo", "sum"), ("gloo", "UserError"))
]
CASES += [("torchrun", "sum", "ddp"), ("mpi", "UserError", "fsdp")]


@pytest.mark.parametrize(("by", "kind", "strategy"), CASES)
def test_failing_rank_ends_all(by: str, kind: str, strategy: str, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("failing_rank.py")
    outcome = run([*launcher(2, by), sys.executable, worker, tmp_path, kind, strategy], tmp_path)
    ended = time.time()
    assert not outcome.hung, outcome
    assert outcome.status != 0, outcome
    assert ended - float((tmp_path / "failed_at").read_text()) < 30, outcome
    output, where = said(outcome), f"rank 1 on {os.uname().nodename}"
    if kind == "UserError":
        assert output.count(f"hvd_bert: {where}: a mistake on its own") == 1, outcome
    else:
        assert output.count(f"{where} failed:") == 1, outcome
        assert "RuntimeError: broken" in output, outcome
    assert output.count(where) == 1, outcome
