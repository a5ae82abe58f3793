"""Log lines and events.jsonl: their formats, which ranks write what, and the recorded reason why a run ended."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_world import make_world

from hvd_bert.distributed import events, logs
from hvd_bert.distributed.logs import collected, start
from hvd_bert.errors import UserError, log

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the logging configuration that `start` changes."""
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    logging.captureWarnings(False)
    with warnings.catch_warnings():
        yield
    logging.captureWarnings(False)
    root.handlers[:] = before
    log.setLevel(logging.NOTSET)


@pytest.mark.parametrize("launcher", [False, True])
def test_lines_have_times_except_on_a_terminal_without_a_launcher(capsys, monkeypatch, launcher):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if launcher:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    start(rank=0)
    log.info("one of %d", 2)
    log.warning("two\nlines")
    output, times = capsys.readouterr(), (f"{TIME}INFO ", f"{TIME}WARNING ") if launcher else ("", "")
    assert re.fullmatch(f"{times[0]}one of 2\n{times[1]}two\nlines\n", output.out) and output.err == ""


def test_control_characters_are_escaped_and_other_text_is_not(capsys):
    start(rank=0)
    unchanged = "\t\n\u3000\u200d\u00a0"
    log.warning(f"{unchanged}\x1b[31m \r \x00 \x7f \x9b \ud800 \\x1b")
    assert capsys.readouterr().out.endswith(rf"WARNING {unchanged}\x1b[31m \r \x00 \x7f \x9b \ud800 \x1b" + "\n")


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines printed since the previous call, without times and levels."""
    return [re.sub(f"^{TIME}[A-Z]+ ", "", line) for line in capsys.readouterr().out.splitlines()]


def test_warnings_of_several_ranks_are_shown_once(capsys):
    start(rank=0)
    logs.show([["disk is 90% full", "a"], ["disk is 90% full", "b", "b"], ["disk is 90% full"], ["a"]])
    assert shown(capsys) == ["ranks 0-2: disk is 90% full", "ranks 0, 3: a", "rank 1: b"]


def test_collected_warnings_are_printed_if_another_thread_ends_the_process(capsys, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda status: None)
    start(rank=1)
    with collected():
        log.warning("disk is slow")
        make_world(rank=1, size=2).abort(1)  # as the stall watchdog does
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


@pytest.fixture(autouse=True)
def new_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own event log: the process's log may record the failed run of another test."""
    new = events.Events()
    for name in ("begin", "add", "failed", "end"):
        monkeypatch.setattr(events, name, getattr(new, name))


def read(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / events.NAME).read_text().splitlines()]
    assert all(line.pop("time") > 1.7e9 for line in lines)
    return lines


def test_start_warnings_and_end(tmp_path):
    logs.start(rank=0)
    logs.log.warning("before the folder is known")
    events.begin(tmp_path, True, {"launcher": "srun", "world_size": 2})
    logs.log.info("no warning")
    logs.show([["later \ud800"]] * 2)
    logs.report("hvd_bert: the disk is full")
    events.end()
    events.failed("of another command in this process")
    early, start, later, end = read(tmp_path)
    assert early == {"event": "warning", "ranks": [0], "message": "before the folder is known"}
    assert (start["event"], start["world_size"], start["launcher"]) == ("start", 2, "srun")
    assert start["command"].startswith("python ")
    assert later == {"event": "warning", "ranks": [0, 1], "message": "later \ud800"}
    assert end == {"event": "end", "message": "hvd_bert: the disk is full"}


def test_another_rank_records_only_the_reason_of_its_end(tmp_path):
    logs.start(rank=1)
    logs.log.warning("before the folder is known")
    events.begin(tmp_path, False, {})
    logs.log.warning("later")
    events.failed("not the same folder")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / events.NAME).touch()
    events.failed("rank 1 failed")
    assert read(tmp_path) == [{"event": "end", "message": "rank 1 failed"}]


def test_a_full_disk_is_reported_once(tmp_path, capsys, monkeypatch):
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    logs.start(rank=0)
    events.begin(tmp_path, True, {})
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        logs.log.warning("first")
        logs.log.warning("second")
    logs.log.warning("third")
    reason, *logged = (line.split(" WARNING ")[1] for line in capsys.readouterr().out.splitlines())
    assert f"{tmp_path}/{events.NAME}" in reason and "No space left" in reason
    assert logged == ["first", "second", "third"]
    assert [line["message"] for line in read(tmp_path)[1:]] == ["first", reason, "second", "third"]
