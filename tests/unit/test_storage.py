"""File locks, atomic writes, records, and the folder cache, which builds each key once for all processes."""

from __future__ import annotations

import errno
import fcntl
import io
import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from refusals import refused

from hvd_bert.data import cache
from hvd_bert.errors import UserError
from hvd_bert.storage import locks, writing
from hvd_bert.storage.writing import replacing, write_json, writing_to
from hvd_bert.tools.runs.out_folder import read_record

SPAWN = multiprocessing.get_context("spawn")


def hold(path: Path, acquired) -> None:
    with locks.acquire(path, wait=True):
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
        locks.acquire(tmp_path / ".lock", wait=False)
    holder.kill()
    locks.acquire(tmp_path / ".lock", wait=True).release()


def test_waiting_and_a_forked_child_that_does_not_free_the_lock(tmp_path, holder):
    threading.Timer(0.3, holder.kill).start()
    with locks.acquire(tmp_path / ".lock", wait=True):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with (tmp_path / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lock_leaves_a_users_file_unchanged(tmp_path):
    (tmp_path / ".lock").write_text("notes")
    locks.acquire(tmp_path / ".lock", wait=False).release()
    assert (tmp_path / ".lock").read_text() == "notes"


def test_target_of_a_symbolic_link_does_not_change(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic link"):
        locks.acquire(tmp_path / ".lock", wait=False)
    assert (tmp_path / "precious").read_text() == "text"


def test_file_system_without_locks(tmp_path, monkeypatch, caplog):
    flock, temporary = fcntl.flock, tmp_path / "tmp"
    temporary.mkdir()

    def refuse(descriptor: int, operation: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent == tmp_path:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locks.tempfile, "tempdir", str(temporary))
    with locks.acquire(tmp_path / ".lock", wait=False):
        assert "No locks available" in caplog.text
        (instead,) = temporary.iterdir()
        assert instead.stat().st_mode & 0o777 == 0o600
        with pytest.raises(locks.InUse, match=f"process {os.getpid()} on "):
            locks.acquire(tmp_path / ".lock", wait=False)
    instead.unlink()
    instead.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        locks.acquire(tmp_path / ".lock", wait=False)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("failing", ["write", "replace", ""])
def test_a_write_replaces_the_whole_file_or_keeps_the_old_file(tmp_path, monkeypatch, failing):
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


def test_second_writer_of_a_file_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / "x.json"
    with replacing(path) as partial:
        partial.write_text("the first half")
        with pytest.raises(OSError, match="another process"):
            write_json(path, "the second's")
        assert partial.read_text() == "the first half" and not path.exists()
    assert path.read_text() == "the first half" and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("name", ["tb", "out/train_config.yaml"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, name):
    path = tmp_path / name
    path.mkdir(parents=True)
    with refused(f"--output_dir {tmp_path} cannot be written: {path}: "), writing_to("--output_dir", tmp_path):
        write_json(path, 1)
    with refused(f"--json {path} cannot be written: Is a"), writing_to("--json", path):
        write_json(path, 1)


def test_full_disk_is_seen_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(writing.tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "w"))
    with pytest.raises(OSError, match="No space left"):
        writing.check_folder(tmp_path)


def raising(*_: object) -> None:
    raise OSError("killed")


@dataclass
class Row:
    seconds: float


@dataclass
class Rows:
    rows: list[Row]


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ('{"rows": [{"seconds": 1}, {"seconds": "x"}]}', "rows[1].seconds"),
        ('{"rows": [{"count": 1}]}', "seconds"),
        ("[]", "array"),
        (None, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_content_of_a_record_is_named_with_its_path(tmp_path, content, path):
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    with refused(file, path):
        read_record(file, Rows)


def build(folder: Path) -> None:
    (folder / "data").write_text("whole")


def build_with_log(folder: Path) -> None:
    with open(folder.parent / "log", "a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.3)  # so that other processes probably arrive meanwhile
    build(folder)


def request_at_once(cache_dir: Path, barrier) -> None:
    barrier.wait()
    assert cache.entry(cache_dir, "key", build_with_log)


def build_half_and_wait(cache_dir: Path, started) -> None:
    def half(folder: Path) -> None:
        (folder / "data").write_text("wh")
        started.set()
        signal.pause()

    cache.entry(cache_dir, "key", half)


def test_four_processes_at_once_build_once(tmp_path):
    barrier = SPAWN.Barrier(4)
    children = [SPAWN.Process(target=request_at_once, args=(tmp_path, barrier)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 4
    assert len((tmp_path / "log").read_text().split()) == 1
    assert not list(tmp_path.glob("tmp-*"))


def test_killed_builder_frees_the_lock(tmp_path):
    started = SPAWN.Event()
    child = SPAWN.Process(target=build_half_and_wait, args=(tmp_path, started))
    child.start()
    assert started.wait(60)
    child.kill()
    child.join()
    assert len(list(tmp_path.glob("tmp-*"))) == 1
    assert not (tmp_path / "key").exists()
    assert cache.entry(tmp_path, "key", build)


def test_leftovers_of_others_are_removed_after_a_day(tmp_path):
    for name, age_days in (("tmp-1", 2), ("tmp-2", 0)):
        (tmp_path / name).mkdir()
        then = (tmp_path / name).stat().st_mtime - age_days * 24 * 3600
        os.utime(tmp_path / name, (then, then))
    cache.entry(tmp_path, "key", build)
    assert {path.name for path in tmp_path.iterdir()} == {"tmp-2", "key", "key.lock"}


def test_failed_build_leaves_nothing_and_can_be_repeated(tmp_path):
    def fail(folder: Path) -> None:
        build(folder)
        raise UserError("the questions are wrong")

    with pytest.raises(UserError):
        cache.entry(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert cache.entry(tmp_path, "key", build)


def test_first_of_two_nodes_wins(tmp_path):
    """Where file locks do not work across nodes, two nodes may build the same entry; the first rename wins."""
    others = cache.entry(tmp_path / "other node", "key", build)
    inode = others.stat().st_ino

    def build_late(folder: Path) -> None:
        build(folder)
        others.rename(tmp_path / "key")

    entry = cache.entry(tmp_path, "key", build_late)
    assert entry.stat().st_ino == inode
    assert not list(tmp_path.glob("tmp-*"))


def test_errors_name_the_variable_to_set(tmp_path):
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with refused("No space left", "HVD_BERT_CACHE"):
        cache.entry(tmp_path, "key", fill)
    (tmp_path / "file").touch()
    with refused("HVD_BERT_CACHE"):
        cache.entry(tmp_path / "file" / "windows", "key", build)


@pytest.mark.parametrize(
    ("variable", "xdg", "expected"),
    [
        ("/mine", "/xdg", "/mine/windows"),
        ("~/mine", "/xdg", "/home/u/mine/windows"),
        ("", "$HOME/xdg", "/home/u/xdg/hvd_bert/windows"),
        ("", "", "/home/u/.cache/hvd_bert/windows"),
    ],
)
def test_default_folder(monkeypatch, variable, xdg, expected):
    for name, value in (("HVD_BERT_CACHE", variable), ("XDG_CACHE_HOME", xdg), ("HOME", "/home/u")):
        monkeypatch.setenv(name, value)
    assert cache.default_cache_dir() == Path(expected)
