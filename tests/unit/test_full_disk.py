"""A disk that is full or read-only: one message before training; during training a warning, and training continues."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_metrics_log import SCORES, metrics, rows
from test_output_dir import recording
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  fixtures

from hvd_bert.distributed.world import CollectiveError
from hvd_bert.monitoring import recording as recording_module
from hvd_bert.output import metrics_log
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.output.reporters import tensorboard
from hvd_bert.output.reporters.base import open_reporters
from hvd_bert.storage.writing import JsonLines
from hvd_bert.training import loop

FULL = Path("/dev/full")


def raising(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("module", "opener"), [(metrics_log, "JsonLines"), (tensorboard, "RecordWriter"), (loop, "GpuUsage")]
)
def test_files_that_cannot_be_opened_end_the_run_before_training(base, tmp_path, monkeypatch, module, opener):  # noqa: F811
    monkeypatch.setattr(module, opener, raising(errno.EROFS))
    with pytest.raises(CollectiveError) as failed:
        train(base, "--output_dir", str(tmp_path / "out"))
    assert f"--output_dir {tmp_path / 'out'}" in str(failed.value) and "Read-only" in str(failed.value)
    assert failed.value.status == 2


@pytest.mark.parametrize("lost", ["space", "folder"])
def test_metrics_that_cannot_be_written_are_one_warning_each(tmp_path, caplog, lost):
    (reporter,) = open_reporters(["tensorboard"], tmp_path)
    metrics_logger = MetricsLogger(tmp_path, enabled=True, reporters=[reporter])
    if lost == "folder":
        shutil.rmtree(tmp_path)
    for descriptor in (metrics_logger.jsonl._file, reporter._writer._writer.fileno()) if lost == "space" else ():
        os.dup2(os.open(FULL, os.O_WRONLY), descriptor)  # their own files do not open a device
    assert not [thread for thread in threading.enumerate() if "EventLogger" in type(thread).__name__]
    metrics_logger.begin(3, step=0, steps_per_epoch=3)
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        for step in (1, 2):
            metrics_logger.logged(step, metrics(step))
        metrics_logger.evaluated(SCORES, "f1 60", 2)
        metrics_logger.close()
    named = {"space": ["TensorBoard", "metrics.jsonl"], "folder": []}[lost]
    assert [name for name in ("TensorBoard", "metrics.jsonl") for text in caplog.messages if name in text] == named
    assert all("No space left on device" in text for text in caplog.messages)


@contextmanager
def full_disk(lines: JsonLines) -> Iterator[None]:
    """Inside the block its file cannot be written."""
    space = os.dup(descriptor := lines._file)
    full = os.open(FULL, os.O_WRONLY)
    os.dup2(full, descriptor)
    yield
    os.dup2(space, descriptor)
    os.close(space)
    os.close(full)


def test_lines_are_written_once_there_is_space(tmp_path, caplog):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    values = [{"step": step, "text": "x" * 400} for step in range(100)]  # more than Python's buffers hold
    with full_disk(lines), caplog.at_level(logging.WARNING, "hvd_bert"):
        for value in values:
            lines.write(value)
        assert rows(tmp_path) == [] and len(caplog.messages) == 1
    lines.write({"step": -1})
    assert rows(tmp_path) == [*values, {"step": -1}]
    lines.close()


def test_disk_that_fills_within_a_line(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    write, space = os.write, [5]

    def limited(descriptor: int, content: bytes) -> int:
        if not space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[: space.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", limited)
        lines.write({"step": 1})
    lines.close()
    assert rows(tmp_path) == [{"step": 1}]


def test_timeline_that_cannot_be_recorded_is_a_warning(tmp_path, monkeypatch, caplog):
    recorded = recording(tmp_path / "new" / "t.json")
    monkeypatch.setattr(recording_module, "make_folder", raising(errno.ENOSPC))
    recorded.world.start_timeline = recorded.world.stop_timeline = lambda *_: None  # Horovod prints its own line
    with caplog.at_level(logging.INFO, "hvd_bert"):
        for step in (1, 2, 3):
            recorded.before(step)
            recorded.after(step, tmp_path)
        recorded.close()
    assert len(caplog.messages) == 1 and f"{tmp_path / 'new' / 't.json'}" in caplog.text
