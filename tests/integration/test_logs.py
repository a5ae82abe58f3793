"""Warnings of two ranks: each once, with its ranks, with or without times, also if the run fails right after."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from commands import TIME, said
from launch import launcher, run

pytestmark = pytest.mark.integration

WAYS = [("mpirun", "horovod"), ("gloo", "horovod"), ("torchrun", "ddp")]


def lines_of(by: str, strategy: str, log_format: str, failure: str, folder: Path) -> list[str]:
    """The lines of the ranks, without times if all have one, or if none is to have one."""
    worker = Path(__file__).with_name("warning_ranks.py")
    outcome = run([*launcher(2, by), sys.executable, worker, strategy, log_format, failure], folder)
    assert not outcome.hung and bool(outcome.status) == (failure != "none"), outcome
    timed = TIME.findall(re.sub(r"^\[[\d,]+\]<stdout>:", "", outcome.output, flags=re.MULTILINE))
    assert bool(timed) == (log_format == "default"), outcome  # under every launcher, also on Open MPI's terminal
    return said(outcome).splitlines()


def count(lines: list[str], pattern: str) -> int:
    return sum(bool(re.fullmatch(pattern, line)) for line in lines)


@pytest.mark.parametrize(("log_format", "failure"), [("plain", "none"), ("default", "UserError")])
@pytest.mark.parametrize(("by", "strategy"), WAYS)
def test_each_warning_is_one_line(by: str, strategy: str, log_format: str, failure: str, tmp_path: Path) -> None:
    lines = lines_of(by, strategy, log_format, failure, tmp_path)
    assert count(lines, "started") == 1, lines
    assert count(lines, "ranks 0, 1: the disk is slow") == count(lines, ".*the disk is slow") == 1, lines
    assert count(lines, "ranks 0, 1: .*: FutureWarning: an old call") == count(lines, ".*an old call") == 1, lines
    assert count(lines, "rank 1: the disk is 90% full") == count(lines, ".*90% full") == 1, lines
    if failure == "none":
        assert count(lines, "too late for all ranks") == count(lines, "rank 1: too late for all ranks") == 1, lines
    else:
        assert count(lines, "hvd_bert: rank 1 on .*: the disk is full") == 1, lines


@pytest.mark.parametrize(("by", "strategy"), WAYS)
def test_rank_that_fails_right_after_loses_no_warning(by: str, strategy: str, tmp_path: Path) -> None:
    lines = lines_of(by, strategy, "default", "RuntimeError", tmp_path)
    for text in ("the disk is slow", "the disk is 90% full"):
        assert count(lines, f"rank 1: {text}") == 1, lines
    assert count(lines, "rank 1: .*: FutureWarning: an old call") == 1, lines
    assert count(lines, "rank 1 on .* failed:") == 1, lines
