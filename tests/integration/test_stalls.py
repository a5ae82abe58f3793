"""A rank that stalls in a step ends the job and is named with the missing gradients. Stragglers continue."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
import stopping_at
from commands import printed, small_run
from launch import Outcome, launcher, run

from hvd_bert.tools.runs.failure import first_failure

pytestmark = pytest.mark.integration

WARN_S, END_S = 2, 4
TIMES = {"HOROVOD_STALL_CHECK_TIME_SECONDS": str(WARN_S), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(END_S)}
NAMES = r"(bert|qa_outputs)\.[a-z.A-Z_0-9]+(, (bert|qa_outputs)\.[a-z.A-Z_0-9]+){2}"


def train(folder: Path, size: int, by: str, program: list[object], *flags: object) -> Outcome:
    words = [sys.executable, *map(str, program), *small_run(size, "out", *map(str, flags))[3:]]
    return run([*launcher(size, by), *words], folder, env=TIMES)


@pytest.mark.parametrize(("size", "by"), [(2, "gloo"), (3, "mpirun")])
def test_stalled_rank_ends_the_job_and_is_named(tmp_path: Path, size: int, by: str) -> None:
    """Rank 1 stops in the fourth step, when Horovod's response cache has the tensors of a step."""
    outcome = train(tmp_path, size, by, [stopping_at.__file__, 4, 1, "SIGSTOP", "start"])
    assert not outcome.hung and outcome.status != 0, outcome
    assert time.time() - float((tmp_path / "signalled").read_text()) < END_S + 30, outcome
    text, host = printed(outcome), os.uname().nodename
    assert text.count(" has waited ") == 1 and "Traceback" not in text, outcome
    first = first_failure(outcome.output.splitlines())
    waited = rf"rank 0 on {host} has waited {END_S} s for rank 1 on {host} to reach {NAMES} and \d+ more"
    assert re.fullmatch(waited, first), first


def test_straggler_is_no_stall(tmp_path: Path) -> None:
    """Loading a model, writing a checkpoint and evaluating may take longer than the limit of a step."""
    program = Path(__file__).with_name("stalling.py")
    outcome = train(tmp_path, 2, "mpi", [program], "--save_steps", 5).expect(0)
    assert [name for name in ("load_model", "write", "score") if f"held in {name}" not in outcome.output] == []
    assert "Missing ranks" not in outcome.output and "has waited" not in outcome.output, outcome
