"""events.jsonl: starts, warnings and reasons of a run's end."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvd_bert.distributed import events, logs


@pytest.fixture(autouse=True)
def own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another test's run, which failed, are not these."""
    own = events.Events()
    for name in ("begin", "add", "failed", "end"):
        monkeypatch.setattr(events, name, getattr(own, name))


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


def test_another_rank_adds_only_why_it_ends(tmp_path):
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


def test_commands_of_a_slurm_job(tmp_path):
    assert events.job_commands(tmp_path, "12") == []
    for job in ({"id": "12"}, {"id": "11"}, None):
        events.begin(tmp_path, True, {"job": job})
        events.failed("stopped")
        events.end()
    with (tmp_path / events.NAME).open("ab") as file:
        file.write(b'[1]\n\xff\n{"event": "start", "job": {"id": "12"')
    assert events.job_commands(tmp_path, "12") == [events.command()]
