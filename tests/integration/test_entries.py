"""Ranks that end with running threads, fail, warn or cannot join the other ranks (entries.py)."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from commands import TIME, printed
from launch import Outcome, launcher, run

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE

pytestmark = pytest.mark.integration
HOST = os.uname().nodename


def two_ranks(folder: Path, by: str, *words: object, cold: bool = False) -> Outcome:
    """Run `entries.py WORDS...` on two ranks, or on one if `by` is "". Fails if the ranks hang."""
    program = Path(__file__).with_name("entries.py")
    outcome = run([*(launcher(2, by) if by else ()), sys.executable, str(program), *map(str, words)], folder, cold=cold)
    assert not outcome.hung, outcome
    return outcome


@pytest.mark.parametrize(("strategy", "status"), [("horovod", 0), ("fsdp", 75)])
def test_rank_waits_for_threads_and_exit_handlers(tmp_path: Path, strategy: str, status: int) -> None:
    """Without this wait, a thread that runs torch would abort the process during finalization (pytorch#190489)."""
    outcome = two_ranks(tmp_path, "mpirun", "ending", strategy, tmp_path, *([status] if status else []), cold=True)
    outcome.expect(status)
    assert printed(outcome).count("hvd_bert: all know it") == bool(status), outcome
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text().splitlines() == ["thread", "atexit"], outcome


@pytest.mark.parametrize(
    ("by", "kind", "strategy"),
    [
        ("mpi", "allgather", "horovod"),
        ("gloo", "sum", "horovod"),
        ("torchrun", "sum", "ddp"),
        ("mpi", "UserError", "fsdp"),
    ],
)
def test_failing_rank_ends_all(by: str, kind: str, strategy: str, tmp_path: Path) -> None:
    outcome = two_ranks(tmp_path, by, "failing", strategy, tmp_path, kind)
    assert time.time() - float((tmp_path / "failed_at").read_text()) < 30, outcome
    assert outcome.status != 0, outcome
    output, where = printed(outcome), f"rank 1 on {HOST}"
    if kind == "UserError":
        assert output.count(f"hvd_bert: {where}: a mistake") == 1, outcome
    else:
        assert output.count(f"{where} failed:") == 1, outcome
        assert "RuntimeError: broken" in output, outcome
    assert output.count(where) == 1, outcome


# --- warnings: printed once, with ranks and times, even if the run fails right after them ----------------


@pytest.mark.parametrize(
    ("by", "strategy", "failure"),
    [("gloo", "horovod", "none"), ("torchrun", "ddp", "UserError"), ("gloo", "horovod", "RuntimeError")],
)
def test_each_warning_is_one_line(by: str, strategy: str, failure: str, tmp_path: Path) -> None:
    outcome = two_ranks(tmp_path, by, "warning", strategy, failure)
    assert bool(outcome.status) == (failure != "none"), outcome
    assert TIME.search(re.sub(r"^\[[\d,]+\]<stdout>:", "", outcome.output, flags=re.MULTILINE)), "no time"
    lines = printed(outcome).splitlines()

    def count(pattern: str) -> int:
        return sum(bool(re.fullmatch(pattern, line)) for line in lines)

    assert count("rank 1: the disk is 90% full") == 1, lines
    if failure == "RuntimeError":
        assert count("rank 1: the disk is slow") == count("rank 1: .*: FutureWarning: an old call") == 1, lines
        assert count("rank 1 on .* failed:") == 1, lines
        return
    assert count("started") == 1, lines
    assert count("ranks 0, 1: the disk is slow") == count(".*the disk is slow") == 1, lines
    assert count("ranks 0, 1: .*: FutureWarning: an old call") == count(".*an old call") == 1, lines
    if failure == "none":
        assert count("too late for all ranks") == count("rank 1: too late for all ranks") == 1, lines
    else:
        assert count("hvd_bert: rank 1 on .*: the disk is full") == 1, lines


@pytest.mark.parametrize(
    ("by", "name", "status"), [("mpirun", "SIGTERM", 143), ("mpirun", "SIGINT", 130), ("", "SIGUSR1", -10)]
)
def test_stop_during_tokenization_leaves_nothing_in_the_cache(
    by: str, name: str, status: int, tmp_path: Path, own_cache: Path
) -> None:
    """The other rank waits for the lock meanwhile."""
    outcome = two_ranks(tmp_path, by, "tokenizing", "horovod" if by else "none", name).expect(status)
    assert "Traceback" not in outcome.output, outcome
    assert [path.suffix for path in own_cache.iterdir()] == [".lock"], outcome


# --- ranks that have joined through Horovod, but cannot reach the key-value store ------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_cannot_reach_the_others_is_named_once(tmp_path: Path, rank: int) -> None:
    outcome = two_ranks(tmp_path, "mpirun", "unmet", "ddp", rank, "store").expect(EXIT_BAD_INPUT)
    assert printed(outcome).count("hvd_bert: ") == 1, outcome
    here = f"rank {rank} on its host: {HOST}"
    assert f"hvd_bert: {here} cannot reach the other ranks at 127.0.0.1:" in printed(outcome), outcome
    assert "is in" not in outcome.output


def test_rank_that_fails_while_the_group_is_made_ends_all(tmp_path: Path) -> None:
    outcome = two_ranks(tmp_path, "gloo", "unmet", "ddp", 1, "group")
    assert outcome.status == EXIT_FAILURE, outcome
    assert printed(outcome).count("RuntimeError: connectFullMesh failed") == 1, outcome
    assert "is in" not in outcome.output


def test_horovod_trains_without_the_store(tmp_path: Path) -> None:
    """Without the store, the run only warns that stalled ranks cannot be named."""
    outcome = two_ranks(tmp_path, "gloo", "unmet", "horovod", 0, "store").expect(0)
    assert printed(outcome).count("If a rank stalls, it cannot be named: ") == 1, outcome
    assert printed(outcome).count("is in") == 2, outcome
