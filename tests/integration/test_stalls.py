"""A rank that stalls in a step ends the job and is named with its missing gradients; a straggler is not."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import said, small_run
from launch import Outcome, launcher, programs, run

from hvd_bert.tools.runs.failure import first_failure

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("stalling.py")
WARN_S, END_S = 2, 4
TIMES = {"HOROVOD_STALL_CHECK_TIME_SECONDS": str(WARN_S), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(END_S)}
NAMES = r"(bert|qa_outputs)\.[a-z.A-Z_0-9]+(, (bert|qa_outputs)\.[a-z.A-Z_0-9]+){2}"


STALLED = [(2, "gloo", "block"), (3, "mpirun", "stop")]
SLOW = [(2, "mpi", "slow")]
Case = tuple[int, str, str]


class Ended(NamedTuple):
    """A training that ended, and when."""

    outcome: Outcome
    folder: Path
    at: float


def train(case: Case, folder: Path) -> Ended:
    size, by, kind = case
    flags = ("--save_steps", 5) if kind == "slow" else ()
    arguments = small_run(size, "out", *flags)[3:]
    env = TIMES | {"HVD_BERT_CACHE": str(folder / "cache")}
    outcome = run([*launcher(size, by), sys.executable, WORKER, kind, *arguments], folder, env=env)
    return Ended(outcome, folder, time.time())


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Future[Ended]]]:
    """All of them, two at a time: they sleep for most of their time."""
    programs()  # before the threads, which would each start a fork server
    pool = ThreadPoolExecutor(2)
    yield {case: pool.submit(train, case, tmp_path_factory.mktemp("-".join(map(str, case)))) for case in STALLED + SLOW}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", STALLED, ids=lambda case: "-".join(map(str, case)))
def test_stalled_rank_ends_the_job_and_is_named(case: Case, trainings: dict[Case, Future[Ended]]) -> None:
    outcome, folder, ended = trainings[case].result()
    assert not outcome.hung and outcome.status != 0, outcome
    stalled_at, _ = (folder / "stalled").read_text().split()
    assert ended - float(stalled_at) < END_S + 30, outcome
    text, host = said(outcome), os.uname().nodename
    assert text.count(" has waited ") == 1 and "Traceback" not in text, outcome
    first = first_failure(outcome.output.splitlines())
    waited = rf"rank 0 on {host} has waited {END_S} s for rank 1 on {host} to reach {NAMES} and \d+ more"
    assert re.fullmatch(waited, first), first


@pytest.mark.parametrize("case", SLOW, ids=lambda case: "-".join(map(str, case)))
def test_straggler_is_no_stall(case: Case, trainings: dict[Case, Future[Ended]]) -> None:
    """Starting, writing a checkpoint and evaluating may take longer than a step."""
    outcome = trainings[case].result().outcome.expect(0)
    assert [name for name in ("load_model", "write", "score") if f"held in {name}" not in outcome.output] == []
    assert "Missing ranks" not in outcome.output and "has waited" not in outcome.output, outcome
