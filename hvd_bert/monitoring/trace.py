"""Write one trace of all ranks for Perfetto and chrome://tracing: a process row per rank, on rank 0's clock.

A rank's row has the phases of its steps, its threads and GPU streams from torch's profiler, and the times at which its
gradients were ready. Rank 0's also has Horovod's messages. The format: Google, *Trace Event Format*, 2016.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvd_bert.monitoring.timeline_events import TICK, Reader
from hvd_bert.monitoring.timeline_rows import NONE, Batch
from hvd_bert.monitoring.timeline_spans import Spans
from hvd_bert.storage.writing import replacing

Event = dict[str, Any]

# Rows of a rank. Then come its threads and streams, and more rows for messages that overlap.
PHASE_ROW, NEGOTIATION, MESSAGES, READY, THREADS, MORE_MESSAGES = 1, 2, 3, 4, 5, 1000
NAMES = {
    PHASE_ROW: "phases of the step",
    NEGOTIATION: "Horovod: waiting until all ranks are ready",
    MESSAGES: "Horovod: messages",
    READY: "Horovod: tensor ready, as received by rank 0",
}
_EPOCH = re.compile(rb'"start_time_since_epoch_in_micros":(-?\d+)')
_KEPT = "Xsfi"  # spans, the arrows between them, instants


@dataclass
class RankTrace:
    """The recording of a rank. `offset_ns`: by which its clock is ahead of rank 0's. `laps`: the start, then the end of
    each phase, in ns since 1970. `packed`: torch's trace, by `pack`."""

    rank: int
    host: str
    offset_ns: int
    laps: Sequence[tuple[str, int]]
    packed: bytes


def pack(text: bytes) -> bytes:
    """Compress a trace before it is sent to rank 0."""
    return gzip.compress(text, 1)


def write_trace(path: Path, ranks: Sequence[RankTrace], timeline: Path | None) -> None:
    """Write the gzipped trace. `timeline`: Horovod's timeline of the same steps. Raises OSError."""
    start_us = min(trace.laps[0][1] - trace.offset_ns for trace in ranks) / 1000
    with replacing(path) as partial, gzip.open(partial, "wt", compresslevel=6, encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in _events(ranks, timeline):
            if "ts" in event:
                event["ts"] = round(event["ts"] - start_us, 3)
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")


def _events(ranks: Sequence[RankTrace], timeline: Path | None) -> Iterator[Event]:
    """All events, with `ts` in us since 1970 on rank 0's clock."""
    for trace in ranks:
        pid = _pid(trace.rank)
        yield _metadata("process_name", pid, name=f"rank {trace.rank} on {trace.host}")
        yield _metadata("process_sort_index", pid, sort_index=trace.rank)
        of_horovod = () if timeline is None else (READY,) if trace.rank > 0 else (NEGOTIATION, MESSAGES, READY)
        for row in (PHASE_ROW, *of_horovod):
            yield from _row(pid, row, NAMES[row])
        yield from _phases(trace)
        yield from _torch(trace)
    if timeline:
        yield from _horovod(timeline)


def _pid(rank: int) -> int:
    return rank + 1  # Perfetto treats 0 as the idle process


def _metadata(kind: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _row(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield _metadata("thread_name", pid, tid, name=name)
    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _span(name: str, category: str, pid: int, tid: int, start_us: float, end_us: float, **args: Any) -> Event:
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start_us, "dur": end_us - start_us,
        "args": args,
    }  # fmt: skip


def _phases(trace: RankTrace) -> Iterator[Event]:
    since = trace.laps[0][1]
    for phase, now in trace.laps[1:]:
        start, end = ((moment - trace.offset_ns) / 1000 for moment in (since, now))
        yield _span(phase, "phase", _pid(trace.rank), PHASE_ROW, start, end)
        since = now


def _torch(trace: RankTrace) -> Iterator[Event]:
    """torch's events. Its threads of several processes become rows of the rank's process."""
    whole = json.loads(gzip.decompress(trace.packed))
    shift_us = (whole.get("baseTimeNanoseconds", 0) - trace.offset_ns) / 1000
    pid = _pid(trace.rank)
    rows: dict[tuple[Any, Any], int] = {}
    names: dict[tuple[Any, Any], str] = {}
    for event in whole["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for event in whole["traceEvents"]:
        if event["ph"] not in _KEPT or not isinstance(event["pid"], int):  # the profiler's own marks have a name as pid
            continue
        key = event["pid"], event["tid"]
        if key not in rows:
            rows[key] = THREADS + len(rows)
            yield from _row(pid, rows[key], names.get(key, f"thread {event['tid']}"))
        if "id" in event:  # of an arrow: ids are unique only within a rank
            event["id"] = f"{trace.rank}.{event['id']}"
        yield event | {"pid": pid, "tid": rows[key], "ts": event["ts"] + shift_us}


def _horovod(path: Path) -> Iterator[Event]:
    """Horovod's messages and negotiations, and all ranks' ticks if the timeline has them."""
    with path.open("rb") as file:
        epoch = _EPOCH.search(file.read(4096))
    start_us = int(epoch[1]) if epoch else 0
    reader = Reader(path)
    blocks = list(reader.blocks())  # of a few steps
    for block in blocks:
        ticks = block.only(np.flatnonzero(block.phase == TICK))
        for rank, ts, pid in zip(ticks.code.tolist(), ticks.ts.tolist(), ticks.pid.tolist(), strict=True):
            ready = {"ph": "i", "s": "t", "cat": "horovod", "pid": _pid(rank), "tid": READY, "ts": start_us + ts}
            yield ready | {"name": reader.names.tensors.get(pid, "")}
    sent: list[Event] = []
    for batch in Spans(reader.names.spans).batches(iter(blocks)):
        for event in _messages(batch, reader.names.spans, reader.names.tensors, start_us):
            if event["ph"] == "X":
                sent.append(event)
            else:
                yield event
    yield from _without_overlap(sent)


def _without_overlap(spans: list[Event]) -> Iterator[Event]:
    """Move overlapping spans, as of NCCL's messages, to further rows: spans of a row must follow each other or nest."""
    rows: list[list[float]] = []  # per row, the ends of its open spans, the innermost last
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        for ends in rows:
            while ends and ends[-1] <= start:
                ends.pop()
        free = next((number for number, ends in enumerate(rows) if not ends or end <= ends[-1]), len(rows))
        if free == len(rows):
            rows.append([])
            if free:
                yield from _row(event["pid"], MORE_MESSAGES + free, NAMES[MESSAGES])
        rows[free].append(end)
        yield event | {"tid": MORE_MESSAGES + free if free else MESSAGES}


def _messages(batch: Batch, spans: Sequence[str], tensors: dict[int, str], start_us: int) -> Iterator[Event]:
    messages, activities, operations = batch.messages, batch.activities, batch.operations
    for row in range(len(messages.code)):
        members = [tensors.get(pid, "") for pid in operations.pid[operations.message == row].tolist()]
        name, size = spans[messages.code[row]], int(messages.size[row])
        seen, ready, start, end = (
            start_us + int(column[row]) for column in (messages.seen, messages.ready, messages.start, messages.end)
        )
        args = {"tensors": members} | ({"bytes": size} if size != NONE else {})
        yield _span(f"{name} of {len(members)}", "horovod", _pid(0), MESSAGES, start, end, **args)
        wait = {"cat": "horovod", "id": f"{name} {start}", "pid": _pid(0), "tid": NEGOTIATION}
        yield wait | {"ph": "b", "name": f"NEGOTIATE_{name} of {len(members)}", "ts": seen}
        yield wait | {"ph": "e", "name": f"NEGOTIATE_{name} of {len(members)}", "ts": max(seen, ready)}
    for code, start, end in zip(
        *(column.tolist() for column in (activities.code, activities.start, activities.end)), strict=True
    ):
        yield _span(spans[code], "horovod", _pid(0), MESSAGES, start_us + start, start_us + end)
