"""Log lines: both formats, which ranks print what, and warnings of several ranks."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

import pytest
from test_world import make_world

from hvd_bert.distributed import logs
from hvd_bert.distributed.logs import collected, show, start
from hvd_bert.errors import UserError, log

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Puts back what `start` changes."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    logging.captureWarnings(False)
    with warnings.catch_warnings():
        yield
    logging.captureWarnings(False)
    root.handlers[:] = before
    log.setLevel(logging.NOTSET)


@pytest.mark.parametrize(("terminal", "launcher", "timed"), [(True, False, False), (True, True, True)])
def test_lines_have_times_except_on_a_terminal_without_a_launcher(capsys, monkeypatch, terminal, launcher, timed):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    if launcher:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    start(rank=0)
    log.info("one of %d", 2)
    log.warning("two\nlines")
    said, times = capsys.readouterr(), (f"{TIME}INFO ", f"{TIME}WARNING ") if timed else ("", "")
    assert re.fullmatch(f"{times[0]}one of 2\n{times[1]}two\nlines\n", said.out) and said.err == ""


def test_control_characters_are_escaped_and_other_text_is_not(capsys):
    start(rank=0)
    kept = "\t\n\u3000\u200d\u00a0"
    log.warning(f"{kept}\x1b[31m \r \x00 \x7f \x9b \ud800 \\x1b")
    assert capsys.readouterr().out.endswith(rf"WARNING {kept}\x1b[31m \r \x00 \x7f \x9b \ud800 \x1b" + "\n")


def test_other_ranks_print_warnings_with_their_rank(capsys):
    start(rank=3)
    log.info("of no interest")
    log.warning("disk is slow")
    logging.getLogger("hvd_bert.data").error("disk is full")
    logging.getLogger("some_library").warning("a library's")
    lines = [re.sub(f"^{TIME}", "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["WARNING rank 3: disk is slow", "ERROR rank 3: disk is full", "WARNING rank 3: a library's"]


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines since the last call, without times and levels."""
    return [re.sub(f"^{TIME}[A-Z]+ ", "", line) for line in capsys.readouterr().out.splitlines()]


def test_warnings_of_several_ranks_are_shown_once(capsys):
    by_rank = []
    for rank, said in enumerate((["disk is 90% full", "a"], ["disk is 90% full", "b", "b"], ["disk is 90% full"])):
        start(rank)
        with collected() as kept:
            for text in said:
                log.warning(text)
            by_rank.append(kept[:])
            kept.clear()
    assert shown(capsys) == []
    start(rank=0)
    show(by_rank)
    assert shown(capsys) == ["ranks 0-2: disk is 90% full", "a", "rank 1: b"]
    logs.show([["no GPU"], [], ["no GPU"], ["half a GPU"]])
    assert shown(capsys) == ["ranks 0, 2: no GPU", "rank 3: half a GPU"]


def test_nothing_is_lost_if_another_thread_ends_the_process(capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda status: None)
    start(rank=1)
    with collected():
        log.warning("disk is slow")
        make_world(rank=1, size=2).abort(1)  # as a watchdog does
        assert shown(capsys) == ["rank 1: disk is slow"]
    assert shown(capsys) == []


def test_warnings_of_a_rank_that_cannot_gather_are_printed_there(capsys):
    start(rank=1)
    world = make_world(rank=1, size=2)

    def allgather(mine):
        raise RuntimeError("Connection closed by peer")

    world.allgather = allgather  # type: ignore[method-assign]
    with pytest.raises(RuntimeError), world.raise_on_all_ranks():
        log.warning("disk is slow")
        raise UserError("disk is full")
    assert shown(capsys) == ["rank 1: disk is slow"]
