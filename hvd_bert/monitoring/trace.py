"""Write one trace of all ranks for Perfetto and chrome://tracing: a process row per rank, by its host's clock.

A rank's row has the phases of its steps, and its threads and GPU streams from torch's profiler. The format: Google,
*Trace Event Format*, 2016.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_bert.storage.writing import replacing

Event = dict[str, Any]

PHASE_ROW, THREADS = 1, 2  # rows of a rank; its threads and streams follow
_KEPT = "Xsfi"  # spans, the arrows between them, instants


@dataclass
class RankTrace:
    """The recording of a rank. `laps`: the start, then the end of each phase, in ns since 1970. `packed`: torch's
    trace, by `pack`."""

    rank: int
    host: str
    laps: Sequence[tuple[str, int]]
    packed: bytes


def pack(text: bytes) -> bytes:
    """Compress a trace before it is sent to rank 0."""
    return gzip.compress(text, 1)


def write_trace(path: Path, ranks: Sequence[RankTrace]) -> None:
    """Write the gzipped trace. Raises OSError."""
    start_us = min(trace.laps[0][1] for trace in ranks) / 1000
    with replacing(path) as partial, gzip.open(partial, "wt", compresslevel=6, encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for event in _events(ranks):
            if "ts" in event:
                event["ts"] = round(event["ts"] - start_us, 3)
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]}\n")


def _events(ranks: Sequence[RankTrace]) -> Iterator[Event]:
    """All events, with `ts` in us since 1970."""
    for trace in ranks:
        pid = _pid(trace.rank)
        yield _metadata("process_name", pid, name=f"rank {trace.rank} on {trace.host}")
        yield _metadata("process_sort_index", pid, sort_index=trace.rank)
        yield from _row(pid, PHASE_ROW, "phases of the step")
        yield from _phases(trace)
        yield from _torch(trace)


def _pid(rank: int) -> int:
    return rank + 1  # Perfetto treats 0 as the idle process


def _metadata(kind: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _row(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield _metadata("thread_name", pid, tid, name=name)
    yield _metadata("thread_sort_index", pid, tid, sort_index=tid)


def _phases(trace: RankTrace) -> Iterator[Event]:
    since = trace.laps[0][1]
    for phase, now in trace.laps[1:]:
        start, end = (since / 1000, now / 1000)
        span = {"ph": "X", "name": phase, "cat": "phase", "ts": start, "dur": end - start, "args": {}}
        yield span | {"pid": _pid(trace.rank), "tid": PHASE_ROW}
        since = now


def _torch(trace: RankTrace) -> Iterator[Event]:
    """torch's events. Its threads of several processes become rows of the rank's process."""
    whole = json.loads(gzip.decompress(trace.packed))
    shift_us = whole.get("baseTimeNanoseconds", 0) / 1000
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
