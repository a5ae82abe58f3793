"""Log lines: both formats, which ranks print what, and warnings of several ranks."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator

import pytest
from tables import each
from test_world import heard, make_world

from hvd_bert.distributed import logs
from hvd_bert.distributed.logs import collected, describe_ranks, log, show, start
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import UserError

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts back what `start` changes."""
    monkeypatch.setattr(logs, "_console", None)
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    logging.captureWarnings(False)
    with warnings.catch_warnings():
        yield
    logging.captureWarnings(False)
    root.handlers[:] = before
    log.setLevel(logging.NOTSET)


@each(("log_format", "before", "warning"), [("plain", "", ""), ("full", f"{TIME}INFO ", f"{TIME}WARNING ")])
def test_formats(capsys, log_format, before, warning):
    start(rank=0, log_format=log_format)
    log.info("one of %d", 2)
    log.warning("two\nlines")
    said = capsys.readouterr()
    assert re.fullmatch(f"{before}one of 2\n{warning}two\nlines\n", said.out) and said.err == ""


@each(("terminal", "launcher", "plain"), [(True, False, True), (False, False, False), (True, True, False)])
def test_default_is_plain_on_a_terminal_without_a_launcher(capsys, monkeypatch, terminal, launcher, plain):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    if launcher:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    start(rank=0)
    log.info("one")
    assert (capsys.readouterr().out == "one\n") == plain


def test_other_ranks_print_warnings_with_their_rank(capsys):
    start(rank=3, log_format="full")
    log.info("of no interest")
    log.warning("disk is slow")
    logging.getLogger("hvd_bert.data").error("disk is full")
    logging.getLogger("some_library").warning("a library's")
    lines = [re.sub(f"^{TIME}", "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["WARNING rank 3: disk is slow", "ERROR rank 3: disk is full", "WARNING rank 3: a library's"]


def test_warnings_of_python(capsys):
    start(rank=1, log_format="plain")
    warnings.warn("this will go away", FutureWarning, stacklevel=1)
    said = capsys.readouterr()
    assert re.match(r"rank 1: .*test_logs\.py:\d+: FutureWarning: this will go away\n", said.out)
    assert not said.out.endswith("\n\n") and said.err == ""


def test_warnings_of_several_ranks_are_shown_once(capsys):
    by_rank = []
    for rank, said in enumerate((["disk is 90% full", "a"], ["disk is 90% full", "b", "b"], ["disk is 90% full"])):
        start(rank, "plain")
        with collected() as kept:
            for text in said:
                log.warning(text)
            by_rank.append(kept[:])
            kept.clear()
    assert capsys.readouterr().out == ""
    start(rank=0, log_format="plain")
    show(by_rank)
    assert capsys.readouterr().out == "ranks 0-2: disk is 90% full\na\nrank 1: b\n"


def test_collected_warnings_are_shown_in_the_order_of_their_own_times(capsys):
    start(rank=0, log_format="full")
    with collected() as kept:
        log.warning("later")
        log.warning("earlier")
        first, second = kept
        kept.clear()
    first.created, second.created = 86400 * 365, 86400 * 300  # of 1971 and 1970
    show([[], [first, second]])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4] + line[19:] for line in lines] == ["1970 WARNING rank 1: earlier", "1971 WARNING rank 1: later"]


def test_nothing_is_lost_if_the_block_fails(capsys):
    start(rank=0, log_format="plain")
    with pytest.raises(RuntimeError), collected():
        log.warning("disk is slow")
        log.info("at once")
        assert capsys.readouterr().out == "at once\n"
        raise RuntimeError
    log.warning("later")
    assert capsys.readouterr().out == "disk is slow\nlater\n"


def test_nothing_is_lost_if_another_thread_ends_the_process(capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda status: None)
    start(rank=1, log_format="plain")
    with collected():
        log.warning("disk is slow")
        make_world(rank=1, size=2).abort(1)  # as a watchdog does
        assert capsys.readouterr().out == "rank 1: disk is slow\n"
    assert capsys.readouterr().out == ""


def test_warnings_come_before_the_error_of_all_ranks(capsys):
    start(rank=0, log_format="plain")
    world = make_world(rank=0, size=2)
    with collected() as kept:
        log.warning("disk is slow")
        theirs = kept[:]
        kept.clear()
    heard(world, [None, ("disk is full", theirs)])
    with pytest.raises(CollectiveError, match="rank 1 on its host: disk is full"), world.raise_on_all_ranks():
        log.warning("disk is slow")
        log.warning("only here")
    assert capsys.readouterr().out == "ranks 0, 1: disk is slow\nonly here\n"


def test_warnings_of_a_rank_that_cannot_gather_are_printed_there(capsys):
    start(rank=1, log_format="plain")
    world = make_world(rank=1, size=2)

    def allgather(mine):
        raise RuntimeError("Connection closed by peer")

    world.allgather = allgather  # type: ignore[method-assign]
    with pytest.raises(RuntimeError), world.raise_on_all_ranks():
        log.warning("disk is slow")
        raise UserError("disk is full")
    assert capsys.readouterr().out == "rank 1: disk is slow\n"


def test_warn(capsys):
    start(rank=0, log_format="plain")
    logs.warn(["no GPU", "", "no GPU", "half a GPU"])
    assert capsys.readouterr().out == "ranks 0, 2: no GPU\nrank 3: half a GPU\n"


def test_describe_ranks():
    assert describe_ranks([1]) == "rank 1"
    assert describe_ranks([0, 1]) == "ranks 0, 1"
    assert describe_ranks([0, 1, 2]) == "ranks 0-2"
    assert describe_ranks([0, 2, 4, 5, 6, 9]) == "ranks 0, 2, 4-6, 9"
