"""Recordings: their steps, the clocks of hosts, and the content of the trace of all ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_timelines import Timeline
from tables import each, refused

from hvd_bert.config.command_line import before_joining, parse
from hvd_bert.distributed.horovod_world import ready_for_timeline
from hvd_bert.monitoring.recording import _offset
from hvd_bert.monitoring.trace import RankTrace, _without_overlap, pack, write_trace

BASE = ["--config", "sample"]
START_US = 1795285774578916  # of made timelines


@each("steps", ["3", "0:4", "5:4", "a:b", "3:", "-1:2", "1:2:3"])
def test_invalid_steps_are_refused(steps):
    with refused(f"--timeline_steps {steps}"):
        parse([*BASE, f"--timeline_steps={steps}"])


def test_steps_to_record():
    assert parse([*BASE, "--timeline_steps", "3:5"]).profiling.steps_to_record == range(0)
    assert list(parse([*BASE, "--timeline", "t", "--timeline_steps", "3:5"]).profiling.steps_to_record) == [3, 4, 5]
    assert parse([*BASE, "--profile"]).profiling.steps_to_record == range(11, 31)
    with refused("--timeline_file", "--strategy horovod", "ddp"):
        parse([*BASE, "--timeline", "t.json", "--strategy", "ddp"])
    with refused("--timeline_file"):
        parse([*BASE, "--timeline_mark_cycles"])


@each(
    ("flags", "records"),
    [([], False), (["--timeline", "t"], True), (["--profile"], True), (["--profile", "--strategy", "ddp"], False)],
)
def test_timeline_is_known_before_joining(flags, records):
    assert before_joining([*BASE, *flags]).get("records_timeline") == records


def test_the_users_variables_are_kept():
    environ: dict[str, str] = {}
    ready_for_timeline(environ)
    assert environ == {"HOROVOD_TIMELINE": "DYNAMIC", "HOROVOD_CACHE_CAPACITY": "0"}
    mine = {"HOROVOD_TIMELINE": "mine.json", "HOROVOD_CACHE_CAPACITY": "64"}
    ready_for_timeline(mine)
    assert mine == {"HOROVOD_TIMELINE": "mine.json", "HOROVOD_CACHE_CAPACITY": "64"}


@given(
    ahead=st.integers(-(10**9), 10**9),
    rounds=st.lists(st.tuples(*[st.integers(0, 10**6)] * 4), min_size=1, max_size=10),
)
def test_error_of_the_offset_is_at_most_half_the_fastest_round(ahead, rounds):
    """`rounds`: delays after which each rank enters, then delays after the later entry until each rank leaves."""
    first, mine, shortest, now = [], [], [], 0
    for enters, enters_too, leaves, leaves_too in rounds:
        all_in = now + max(enters, enters_too)
        first.append((now + enters, all_in + leaves))
        mine.append((now + enters_too + ahead, all_in + leaves_too + ahead))
        shortest.append((all_in + leaves - now - enters_too) + (all_in + leaves_too - now - enters))
        now = all_in + max(leaves, leaves_too)
    assert abs(_offset(first, mine) - ahead) <= min(shortest) / 2 + 1


def torch_trace(start_us: float) -> bytes:
    """A trace as torch's profiler exports it: a base time, a named thread, a stream, an arrow, its own marks."""
    op = {"ph": "X", "cat": "cpu_op", "pid": 77, "tid": 78, "dur": 5.0, "args": {}}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 78, "args": {"name": "thread 78 (python)"}},
        op | {"name": "aten::mm", "ts": start_us - 1e9},
        op | {"name": "gemm", "cat": "kernel", "pid": 0, "tid": 7, "ts": start_us + 2 - 1e9},
        {"ph": "s", "id": 3, "name": "ac2g", "cat": "ac2g", "pid": 77, "tid": 78, "ts": start_us - 1e9},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler", "pid": "Spans", "tid": "PyTorch", "ts": 0, "dur": 9},
    ]
    return json.dumps({"baseTimeNanoseconds": 10**12, "traceEvents": events}).encode()


def test_trace_of_two_hosts_is_on_one_clock(tmp_path):
    ahead_us = 250_000.0  # of rank 1's clock
    timeline = Timeline()
    timeline.negotiate("grad", {0: 100, 1: 150})
    timeline.send(["grad"], 160, 200)
    path = tmp_path / "timeline.json"
    path.write_text(timeline.text.rstrip(",") + "]")
    ranks = []
    for rank, ahead in ((0, 0.0), (1, ahead_us)):
        begin = START_US + ahead
        laps = [("", begin), ("data", begin + 10), ("compute", begin + 90)]
        in_ns = [(phase, int(moment * 1000)) for phase, moment in laps]
        ranks.append(RankTrace(rank, f"host{rank}", int(ahead * 1000), in_ns, pack(torch_trace(begin + 20))))
    write_trace(tmp_path / "trace.json.gz", ranks, path)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]

    def only(name: str, pid: int) -> dict[str, Any]:
        (event,) = [event for event in events if event["name"] == name and event["pid"] == pid and event["ph"] != "M"]
        return SimpleNamespace(**event)

    for pid in (1, 2):
        assert only("compute", pid).ts == pytest.approx(10, abs=1)
        assert only("compute", pid).dur == pytest.approx(80, abs=1)
        assert only("aten::mm", pid).ts == pytest.approx(20, abs=1)
        assert only("gemm", pid).ts == pytest.approx(22, abs=1)
        assert only("grad", pid).ts == pytest.approx({1: 100, 2: 150}[pid], abs=1)
    assert only("ac2g", 1).id != only("ac2g", 2).id
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 2}
    assert {"thread 78 (python)", "thread 7", "phases of the step"} <= rows
    message = only("ALLREDUCE of 1", 1)
    assert (message.ts, message.dur) == (pytest.approx(160, abs=1), pytest.approx(40, abs=1))
    assert message.args == {"tensors": ["grad"], "bytes": 4 * 256 * 1024}
    assert not list(Path(tmp_path).glob("*.partial"))
    assert "PyTorch Profiler" not in {event["name"] for event in events}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=30))
def test_spans_of_a_row_nest_or_follow_each_other(spans):
    events = [{"ph": "X", "pid": 1, "ts": start, "dur": length} for start, length in spans]
    placed = [event for event in _without_overlap(events) if event["ph"] == "X"]
    assert len(placed) == len(events)
    for i, first in enumerate(placed):
        for second in placed[i + 1 :]:
            first_end, second_end = first["ts"] + first["dur"], second["ts"] + second["dur"]
            apart = first_end <= second["ts"] or second_end <= first["ts"]
            nested = second_end <= first_end or (first_end <= second_end and first["ts"] >= second["ts"])
            assert first["tid"] != second["tid"] or apart or nested
