"""Recordings: their steps, and the content of the trace of all ranks."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.horovod_world import ready_for_timeline
from hvd_bert.monitoring.recording import RankTrace, Recording, write_trace
from hvd_bert.monitoring.usage import process_usage
from hvd_bert.training.meter import Meter

BASE = ["--config", "sample"]
START_US = 1795285774578916


@pytest.mark.parametrize("steps", ["3", "0:4", "5:4", "a:b", "1:2:3", "1:999999999999"])
def test_invalid_steps_are_refused(steps):
    with refused(f"--timeline_steps {steps}"):
        parse([*BASE, f"--timeline_steps={steps}"])


def test_steps_to_record():
    assert parse([*BASE, "--timeline_steps", "3:5"]).profiling.steps_to_record == range(0)
    assert list(parse([*BASE, "--timeline", "t", "--timeline_steps", "3:5"]).profiling.steps_to_record) == [3, 4, 5]
    assert parse([*BASE, "--profile"]).profiling.steps_to_record == range(11, 31)
    with refused("--timeline_file", "--strategy horovod", "ddp"):
        parse([*BASE, "--timeline", "t.json", "--strategy", "ddp"])


def test_timeline_keeps_the_users_variables():
    ready_for_timeline(environ := {"HOROVOD_TIMELINE": "mine.json"})
    assert environ == {"HOROVOD_TIMELINE": "mine.json", "HOROVOD_CACHE_CAPACITY": "0"}


def torch_trace(start_us: float) -> bytes:
    """A trace as torch's profiler exports it: a base time, a named thread, a stream, an arrow, its own marks."""
    op = {"ph": "X", "cat": "cpu_op", "pid": 77, "tid": 78, "dur": 5.0, "args": {}}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 78, "ts": 0.0, "args": {"name": "thread 78 (python)"}},
        op | {"name": "aten::mm", "ts": start_us - 1e9},
        op | {"name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": start_us + 2 - 1e9},
        {"ph": "s", "id": 3, "name": "ac2g", "cat": "ac2g", "pid": 77, "tid": 78, "ts": start_us - 1e9},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler", "pid": "Spans", "tid": "PyTorch", "ts": 0, "dur": 9},
    ]
    return json.dumps({"baseTimeNanoseconds": 10**12, "traceEvents": events}).encode()


def test_durations_do_not_depend_on_the_clock_of_the_day(tmp_path, monkeypatch):
    backwards = itertools.count(10**18, -(10**9))
    monkeypatch.setattr(time, "time_ns", lambda: next(backwards))
    monkeypatch.setattr(time, "time", lambda: next(backwards) / 1e9)
    meter = Meter(make_world())
    wanted = parse([*BASE, "--profile", "--timeline_steps", "1:1"])
    recording = Recording(wanted.profiling, 1, meter, make_world(), False)
    recording.before(1)
    for phase in ("data", "compute", "optimizer"):
        meter.lap(phase)
    recording.after(1, tmp_path)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        phases = [event["dur"] for event in json.load(file)["traceEvents"] if event.get("cat") == "phase"]
    assert len(phases) >= 3 and min(phases) >= 0
    assert 0 < process_usage(torch.device("cpu"))["real_s"] < 24 * 3600


def test_trace_of_two_ranks(tmp_path):
    ranks = []
    for rank, begin in ((0, START_US), (1, START_US + 5)):
        laps = [("", 1000 * begin), ("data", 1000 * (begin + 10)), ("compute", 1000 * (begin + 90))]
        ranks.append(RankTrace(rank, f"host{rank}", laps, gzip.compress(torch_trace(begin + 20))))
    write_trace(tmp_path / "trace.json.gz", ranks)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]

    def only(name: str, pid: int) -> SimpleNamespace:
        (event,) = [event for event in events if event["name"] == name and event["pid"] == pid and event["ph"] != "M"]
        return SimpleNamespace(**event)

    for pid, late in ((1, 0), (2, 5)):
        compute, op, kernel = (only(name, pid) for name in ("compute", "aten::mm", "gemm"))
        assert [compute.ts, compute.dur, op.ts, kernel.ts] == pytest.approx(
            [10 + late, 80, 20 + late, 22 + late], abs=1
        )
    assert only("ac2g", 1).id != only("ac2g", 2).id
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2}
    assert rows == {"thread 78 (python)", "phases of the step"}
    assert "PyTorch Profiler" not in {event["name"] for event in events}
    assert list(tmp_path.glob("trace*")) == [tmp_path / "trace.json.gz"]
