"""A disk that is full or read-only: one message before training; during training a warning, and training continues."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_metrics_log import SCORES, metrics, rows
from test_train_run import base, process_stays_as_it_was, train  # noqa: F401  fixtures
from test_written import recording

from hvd_bert.distributed.world import CollectiveError
from hvd_bert.monitoring import recording as recording_module
from hvd_bert.monitoring.usage import GpuUsage
from hvd_bert.output import metrics_log
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.output.reporters import tensorboard
from hvd_bert.output.reporters.base import start
from hvd_bert.storage.writing import JsonLines
from hvd_bert.train import loop

FULL = Path("/dev/full")


def raising(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize(
    ("module", "opener"), [(metrics_log, "JsonLines"), (tensorboard, "EventFileWriter"), (loop, "GpuUsage")]
)
def test_files_that_cannot_be_opened_end_the_run_before_training(base, tmp_path, monkeypatch, module, opener, number):  # noqa: F811
    monkeypatch.setattr(module, opener, raising(number))
    with pytest.raises(CollectiveError) as failed:
        train(base, "--output_dir", str(tmp_path / "out"))
    assert str(failed.value) == f"--output_dir {tmp_path / 'out'} cannot be written: {os.strerror(number)}."
    assert failed.value.status == 2


def test_metrics_that_cannot_be_written_are_one_warning(tmp_path, monkeypatch, caplog):
    reporters = start(["tensorboard"], tmp_path)
    metrics_logger = MetricsLogger(tmp_path, enabled=True, reporters=reporters)
    os.dup2(os.open(FULL, os.O_WRONLY), metrics_logger.jsonl._file.fileno())  # its own file does not open a device
    metrics_logger.begin(3, step=0, steps_per_epoch=3)
    monkeypatch.setattr(tensorboard.EventFileWriter, "add_event", raising(errno.ENOSPC))
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        for step in (1, 2):
            metrics_logger.logged(step, metrics(step))
        metrics_logger.evaluated(SCORES, "f1 60", 2)
        reporters[0]._thread.join()
        metrics_logger.close()
    assert sorted(caplog.messages) == [
        f"{tmp_path / 'metrics.jsonl'} cannot be written: No space left on device. Training continues.",
        "TensorBoard's file cannot be written: No space left on device. Training continues.",
    ]


@contextmanager
def full_disk(lines: JsonLines) -> Iterator[None]:
    """Inside the block its file cannot be written."""
    space = os.dup(descriptor := lines._file.fileno())
    full = os.open(FULL, os.O_WRONLY)
    os.dup2(full, descriptor)
    yield
    os.dup2(space, descriptor)
    os.close(space)
    os.close(full)


@pytest.mark.parametrize("calls", [[2], [64], [1] * 300], ids=["two lines", "64 in one call", "300 one by one"])
def test_lines_are_written_once_there_is_space(tmp_path, caplog, calls):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    values = [{"step": step, "text": "x" * 400} for step in range(sum(calls))]  # 64 of them exceed Python's buffers
    left = iter(values)
    with full_disk(lines), caplog.at_level(logging.WARNING, "hvd_bert"):
        for number in calls:
            lines.write(*islice(left, number))
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


def test_lines_that_wait_for_space_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(JsonLines, "PENDING_LIMIT", 20)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    with full_disk(lines):
        for step in range(9):
            lines.write({"step": step})
    lines.close()
    assert rows(tmp_path) == [{"step": 0}, {"step": 1}]


def test_gpu_usage_that_cannot_be_opened_starts_no_thread(tmp_path, monkeypatch):
    started: list[object] = []
    monkeypatch.setattr("hvd_bert.monitoring.usage.JsonLines", raising(errno.EROFS))
    monkeypatch.setattr("hvd_bert.monitoring.usage.Sampler", started.append)
    world = SimpleNamespace(rank=0, rank_infos=(SimpleNamespace(device_id="0-a"),))
    with pytest.raises(OSError, match="Read-only"):
        GpuUsage(world, tmp_path)  # type: ignore[arg-type]
    assert started == []


def test_timeline_that_cannot_be_recorded_is_a_warning(tmp_path, monkeypatch, caplog):
    out = tmp_path / "out"
    out.mkdir()
    recorded = recording(tmp_path / "t.json", out)
    monkeypatch.setattr(recording_module.written, "add", raising(errno.ENOSPC))
    with caplog.at_level(logging.INFO, "hvd_bert"):
        for step in (1, 2, 3):
            recorded.before(step)
            recorded.after(step)
        recorded.close()
    assert caplog.messages == [
        f"{tmp_path / 't.json'}: the timeline cannot be recorded: No space left on device. Training continues."
    ]
