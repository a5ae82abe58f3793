"""The folder cache: one build per key for any number of processes, and recovery from leftovers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from refusals import refused

from hvd_bert.data import cache
from hvd_bert.errors import UserError

SPAWN = multiprocessing.get_context("spawn")


def build(folder: Path) -> None:
    (folder / "data").write_text("whole")


def build_with_log(folder: Path) -> None:
    with open(folder.parent / "log", "a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.3)  # makes it likely that the others arrive meanwhile; the assertions do not depend on it
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
    """On file systems whose locks do not reach across nodes, two nodes may build."""
    others = cache.entry(tmp_path / "other node", "key", build)
    inode = others.stat().st_ino

    def build_late(folder: Path) -> None:
        build(folder)
        others.rename(tmp_path / "key")

    real_exists = Path.exists
    with pytest.MonkeyPatch.context() as patch:  # the other node renames between our check and our rename
        patch.setattr(Path, "exists", lambda path: path.name != "key" and real_exists(path))
        entry = cache.entry(tmp_path, "key", build_late)
    assert entry.stat().st_ino == inode
    assert not list(tmp_path.glob("tmp-*"))


def test_errors_name_the_variable_to_set(tmp_path):
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "key").mkdir()
    with refused("key", "No space left", "HVD_BERT_CACHE"):
        cache.entry(tmp_path, "key", fill)
    (tmp_path / "file").touch()
    with refused("HVD_BERT_CACHE"):
        cache.entry(tmp_path / "file" / "windows", "key", build)


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own/windows"),
        ("", "/xdg", "/xdg/hvd_bert/windows"),
        ("", "", "/home/u/.cache/hvd_bert/windows"),
    ],
)
def test_default_folder(monkeypatch, own, xdg, expected):
    for name, value in (("HVD_BERT_CACHE", own), ("XDG_CACHE_HOME", xdg), ("HOME", "/home/u")):
        monkeypatch.setenv(name, value)
    assert cache.default_cache_dir() == Path(expected)
