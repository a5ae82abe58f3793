"""Recordings: their steps, and the content of the trace of all ranks."""

from __future__ import annotations

import gzip
import itertools
import json
import time

import pytest
import torch
from refusals import refused
from test_world import make_world

from hvd_bert.config.command_line import parse
from hvd_bert.distributed.horovod_world import ready_for_timeline
from hvd_bert.monitoring.recording import Recording
from hvd_bert.monitoring.usage import process_usage
from hvd_bert.training.meter import Meter

BASE = ["--config", "sample"]


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
