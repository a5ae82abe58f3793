"""A rank that stalls in a step ends the job and is named with its missing gradients; a straggler is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import said, small_run
from launch import REPOSITORY, Outcome, launcher, run

pytestmark = [pytest.mark.integration, pytest.mark.alone]

WORKER = Path(__file__).with_name("stalling.py")
WARN_S, END_S = 2, 4
TIMES = {"HOROVOD_STALL_CHECK_TIME_SECONDS": str(WARN_S), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(END_S)}
NAMES = r"(bert|qa_outputs)\.[a-z.A-Z_0-9]+(, (bert|qa_outputs)\.[a-z.A-Z_0-9]+){2}"


def train(size: int, by: str, kind: str, folder: Path, *flags: str | float) -> Outcome:
    arguments = small_run(size, "out", *flags)[3:]
    return run([*launcher(size, by), sys.executable, WORKER, kind, *arguments], folder, env=TIMES)


@pytest.mark.parametrize(("size", "by", "kind"), [(3, "mpi", "block"), (2, "gloo", "block"), (3, "mpirun", "stop")])
def test_stalled_rank_ends_the_job_and_is_named(size: int, by: str, kind: str, tmp_path: Path) -> None:
    outcome = train(size, by, kind, tmp_path)
    assert not outcome.hung and outcome.status != 0, outcome
    stalled_at, _ = (tmp_path / "stalled").read_text().split()
    assert time.time() - float(stalled_at) < END_S + 30, outcome
    text, host = said(outcome), os.uname().nodename
    assert text.count(" has waited ") == 1 and "Traceback" not in text, outcome
    script = REPOSITORY / "scripts" / "first_failure.awk"
    command = ["awk", "-f", str(script)]
    first = subprocess.run(command, input=outcome.output, capture_output=True, text=True, check=True, timeout=60).stdout
    waited = rf"rank 0 on {host} has waited {END_S} s for rank 1 on {host} to reach {NAMES} and \d+ more\n"
    assert re.fullmatch(waited, first), first


@pytest.mark.parametrize("by", ["mpi", "gloo"])
def test_straggler_is_no_stall(by: str, tmp_path: Path) -> None:
    """Starting, writing a checkpoint and evaluating may take longer than a step."""
    outcome = train(2, by, "slow", tmp_path, "--save_steps", 5).expect(0)
    assert [name for name in ("load_model", "write", "_score") if f"held in {name}" not in outcome.output] == []
    assert "Missing ranks" not in outcome.output and "has waited" not in outcome.output, outcome
