"""Checkpoints on disk: complete or absent, verified when read, searched newest first, deleted oldest first."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hostile
import pytest
import torch
from processes import killed_before_change
from safetensors import SafetensorError, safe_open

from hvd_bert.checkpoint import files
from hvd_bert.checkpoint.files import Contents, CorruptCheckpoint
from hvd_bert.storage import reading, writing

FILES = ["model.safetensors", "rng.safetensors", "state.json", "config.json", "manifest.json"]


def contents(step: int) -> Contents:
    tensors = {"model": {"weight": torch.full((3, 2), float(step))}, "rng": {"rank0.torch": torch.arange(5)}}
    return Contents(tensors, {"step": step, "learning_rate": 0.1}, {"config.json": b"{}"})


def steps(folder: Path) -> list[int]:
    return [files.checkpoint_step(found) for found in files.candidates(folder)]


def read_state(folder: Path) -> dict:
    return files.read(folder).state


def test_written_checkpoint_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 16)  # so that files have several blocks
    folder = files.write(tmp_path, 7, contents(7))
    found = files.read(folder)
    assert torch.equal(found.tensors["model"]["weight"], torch.full((3, 2), 7.0))
    assert torch.equal(found.tensors["rng"]["rank0.torch"], torch.arange(5))
    assert found.state == {"step": 7, "learning_rate": 0.1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-7", "latest"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # all files get the umask's mode
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers requires it
    sums = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in ((name, (folder / name).read_bytes()) for name in FILES if name != "manifest.json")
    }
    assert json.loads((folder / "manifest.json").read_text()) == {"format": 1, "step": 7, "files": sums}
    files.write(tmp_path, 7, contents(2))
    assert read_state(folder)["step"] == 2


def test_files_are_flushed_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    done, flush, rename = [], writing.flush, Path.rename
    for module in (files, writing):
        monkeypatch.setattr(module, "flush", lambda path: (done.append(path.name), flush(path)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append((path.name, to.name)), rename(path, to)))
    files.write(tmp_path, 7, contents(2))
    partial, latest = ".partial-checkpoint-7", writing.partial_path(tmp_path / "latest").name
    assert sorted(done[:5]) == sorted(FILES)
    assert done[5:] == [partial, (partial, "checkpoint-7"), tmp_path.name, latest, tmp_path.name]


def killed_at_each_change(output_dir: Path, action: Callable[[], object]) -> Iterator[None]:
    """Run `action` in a process that is killed before its n-th file change, for n = 1, 2, ...; yield after each kill.

    Each round starts with a new checkpoint 7, and restores replaced checkpoints before it yields. In the last round,
    which also yields, `action` finishes.
    """
    for change in itertools.count(1):
        files.clear(output_dir)
        files.write(output_dir, 7, contents(7))
        child = os.fork()
        if child == 0:
            with killed_before_change(change):
                action()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        files.restore_replaced(output_dir)
        yield
        files.remove_leftovers(output_dir)
        assert {path.name for path in output_dir.iterdir() if path.name.startswith(".")} <= {
            writing.partial_path(output_dir / "latest").name,
        }
        if status == 0:
            return
        assert status == -signal.SIGKILL


@pytest.mark.slow
def test_a_kill_at_any_point_leaves_a_checkpoint(tmp_path):
    def replace_by_the_next() -> None:
        files.write(tmp_path, 8, contents(8))
        files.prune(tmp_path, 1)

    found = []
    for _ in killed_at_each_change(tmp_path, replace_by_the_next):
        found.append([read_state(folder)["step"] for folder in files.candidates(tmp_path)])
    assert [found[0], found[-1]] == [[7], [8]] and [8, 7] in found and len(found) > 20 and [] not in found
    rewritten = []
    for _ in killed_at_each_change(tmp_path, lambda: files.write(tmp_path, 7, contents(9))):
        (folder,) = files.candidates(tmp_path)
        rewritten.append(read_state(folder)["step"])
    assert set(rewritten) == {7, 9} and len(rewritten) > 20


@pytest.mark.parametrize("name", FILES)
def test_damage_is_named(tmp_path, name):
    path = files.write(tmp_path, 7, contents(7)) / name
    whole = path.read_bytes()
    flipped = bytes([whole[0] ^ 1]) + whole[1:]
    for change in (hostile.text(whole[:-1]), hostile.text(flipped), lambda path: None, *hostile.ALL.values()):
        change(path)
        with pytest.raises(CorruptCheckpoint) as raised:
            files.read(path.parent)
        hostile.check_message(str(raised.value), str(path))
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


STATE_ENTRY = {"bytes": 2, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "manifest",
    [
        {"format": 2, "files": {}},
        *({"format": 1, "files": {"state.json": STATE_ENTRY, name: STATE_ENTRY}} for name in ("", "../x", "\x1b[31m")),
    ],
)
def test_wrong_manifest_is_named(tmp_path, manifest):
    folder = files.write(tmp_path, 7, contents(7))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpoint) as raised:
        files.verify(folder)
    hostile.check_message(str(raised.value), str(folder))


@pytest.mark.parametrize("fails", ["save_file", "mkdir", "rename", "fsync"])
def test_failed_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch, fails):
    files.write(tmp_path, 7, contents(7))

    def full(*_, **__):
        if fails == "save_file":
            raise SafetensorError("No space left")
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = {"save_file": files.safetensors.torch, "fsync": writing.os}.get(fails, Path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, fails, full)
        with pytest.raises(OSError, match="No space left"):
            files.write(tmp_path, 8, contents(8))
    assert steps(tmp_path) == [7]
    assert read_state(tmp_path / "checkpoint-7")["step"] == 7
    files.write(tmp_path, 7, contents(7))
    files.write(tmp_path, 8, contents(8))
    assert steps(tmp_path) == [8, 7]


OTHERS = ["checkpoint-3", "checkpoint-9", "checkpoint-007", "checkpoint-\u0663", "checkpoint-8.aside"]


def test_folders_that_no_run_wrote_stay(tmp_path):
    for step in (7, 8):
        files.write(tmp_path, step, contents(step))
    for name in OTHERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").touch()
    with pytest.raises(OSError, match="checkpoint-9"):
        files.write(tmp_path, 9, contents(9))
    files.prune(tmp_path, 1)
    assert steps(tmp_path) == [9, 8, 3] and (tmp_path / "latest").read_text() == "checkpoint-8\n"
    with pytest.raises(OSError, match=r"checkpoint-8\.aside"):
        files.set_aside_after(tmp_path, 3)
    files.remove_leftovers(tmp_path)
    assert all((tmp_path / name.replace("9", "9.aside") / "notes").exists() for name in OTHERS)


def test_newest_first_and_later_checkpoints_are_set_aside(tmp_path):
    assert files.candidates(tmp_path / "nowhere") == []
    for step in (0, 9, 100, 30):
        files.write(tmp_path, step, contents(step))
    assert steps(tmp_path) == [100, 30, 9, 0] and (tmp_path / "latest").read_text() == "checkpoint-30\n"
    files.prune(tmp_path, 2, keep={"checkpoint-0"})
    assert files.set_aside_after(tmp_path, 0) == ["checkpoint-100.aside", "checkpoint-30.aside"]
    assert steps(tmp_path) == [0] and (tmp_path / "latest").read_text() == "checkpoint-0\n"
    others = ["checkpoint-2-copy", "metrics.jsonl"]
    for name in others:
        (tmp_path / name).touch()
    files.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == others
