"""Ranks that have joined through Horovod but do not reach the key-value store."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from commands import said
from launch import launcher, run

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE

pytestmark = pytest.mark.integration
UNMET = Path(__file__).with_name("unmet.py")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_cannot_reach_the_others_is_named_once(tmp_path: Path, rank: int) -> None:
    outcome = run([*launcher(2, "mpirun"), sys.executable, str(UNMET), str(rank), "ddp", "store"], tmp_path)
    outcome.expect(EXIT_BAD_INPUT)
    assert said(outcome).count("hvd_bert: ") == 1, outcome
    here = f"rank {rank} on its host: {socket.gethostname()}"
    assert f"hvd_bert: {here} cannot reach the other ranks at 127.0.0.1:" in said(outcome), outcome
    assert "is in" not in outcome.output


def test_rank_that_fails_while_the_group_is_made_ends_all(tmp_path: Path) -> None:
    outcome = run([*launcher(2, "gloo"), sys.executable, str(UNMET), "1", "ddp", "group"], tmp_path)
    assert not outcome.hung and outcome.status == EXIT_FAILURE, outcome
    assert said(outcome).count("RuntimeError: connectFullMesh failed") == 1, outcome
    assert "is in" not in outcome.output


def test_horovod_trains_without_that_store(tmp_path: Path) -> None:
    """Without the store a stalled rank cannot be named."""
    outcome = run([*launcher(2, "gloo"), sys.executable, str(UNMET), "0", "horovod", "store"], tmp_path)
    outcome.expect(0)
    assert said(outcome).count("If a rank stalls, it cannot be named: ") == 1, outcome
    assert said(outcome).count("is in") == 2, outcome
