"""File locks: they exclude others, name their holder and end with it. Atomic writes. Records."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from refusals import refused

from hvd_bert.storage import locks
from hvd_bert.storage.reading import Count
from hvd_bert.storage.writing import replacing, write_json
from hvd_bert.tools.bench.record import read_record

SPAWN = multiprocessing.get_context("spawn")


def hold(path: Path, acquired) -> None:
    with locks.take(path, wait=True):
        acquired.set()
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    acquired = SPAWN.Event()
    child = SPAWN.Process(target=hold, args=(tmp_path / ".lock", acquired))
    child.start()
    assert acquired.wait(60)
    yield child
    child.kill()
    child.join()


def test_lock_names_its_holder_and_ends_with_it(tmp_path, holder):
    with refused(f"process {holder.pid} on {socket.gethostname()}"):
        locks.take(tmp_path / ".lock", wait=False)
    holder.kill()
    locks.take(tmp_path / ".lock", wait=True).release()


def test_waiting_and_a_forked_child_that_does_not_free_the_lock(tmp_path, holder):
    threading.Timer(0.3, holder.kill).start()
    with locks.take(tmp_path / ".lock", wait=True) as lock:
        assert not lock.missing
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with (tmp_path / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_target_of_a_symbolic_link_does_not_change(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic link"):
        locks.take(tmp_path / ".lock", wait=False)
    assert (tmp_path / "precious").read_text() == "text"


def test_file_system_without_locks(tmp_path, monkeypatch):
    flock, temporary = fcntl.flock, tmp_path / "tmp"
    temporary.mkdir()

    def refuse(descriptor: int, operation: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent == tmp_path:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks.tempfile, "tempdir", str(temporary))
    with locks.take(tmp_path / ".lock", wait=False) as lock:
        assert lock.missing == "No locks available"
        (instead,) = temporary.iterdir()
        assert instead.stat().st_mode & 0o777 == 0o600
        with pytest.raises(locks.InUse, match=f"process {os.getpid()} on "):
            locks.take(tmp_path / ".lock", wait=False)
    instead.unlink()
    instead.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        locks.take(tmp_path / ".lock", wait=False)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("failing", ["write", "replace", ""])
def test_a_write_replaces_the_whole_file_or_keeps_the_old_one(tmp_path, monkeypatch, failing):
    path = tmp_path / "x.json"
    path.write_text("old")
    (tmp_path / ".x.json.hvd_bert.partial").write_text("the half of a killed writer")
    if failing == "replace":
        monkeypatch.setattr(os, "replace", raising)
    with pytest.raises(OSError) if failing else nullcontext():
        if failing == "write":
            with replacing(path, durable=True) as partial:
                partial.write_text("half of the ne")
                raise OSError("no space left")
        write_json(path, {"a": "Müller"})
    assert path.read_text(encoding="utf-8") == ("old" if failing else '{\n  "a": "Müller"\n}\n')
    assert os.listdir(tmp_path) == ["x.json"]


def raising(*_: object) -> None:
    raise OSError("killed")


@dataclass
class Row:
    seconds: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
    count: Count = 0


@dataclass
class Rows:
    rows: list[Row]
    by_name: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"rows": [{"seconds": 1}, {"seconds": "x"}]}', "rows[1].seconds"),
        ('{"rows": [{"count": 1}]}', "seconds"),
        ("[]", "array"),
        ('{"rows": [{"seconds": 1' + "0" * 400 + "}]}", ""),
        (None, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_content_of_a_record_is_named_with_its_place(tmp_path, content, place):
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    with refused(path, place):
        read_record(path, Rows)
