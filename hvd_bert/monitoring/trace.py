"""Write one trace of all ranks for Perfetto and chrome://tracing: a process per rank, by its host's clock.

A rank has a row with the phases of its steps, and torch's rows of its threads and GPU streams. The format: Google,
*Trace Event Format*, 2016.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from hvd_bert.storage.writing import replacing

_PHASE_ROW = 0  # no thread has this number


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
    start_ns = min(trace.laps[0][1] for trace in ranks)
    events = chain.from_iterable(_events(trace, start_ns) for trace in ranks)
    with replacing(path) as partial, gzip.open(partial, "wt", compresslevel=6, encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n' + json.dumps(next(events)))
        file.writelines(",\n" + json.dumps(event) for event in events)
        file.write("\n]}\n")


def _events(trace: RankTrace, start_ns: int) -> Iterator[dict[str, Any]]:
    """All events of a rank, with `ts` in us since `start_ns`."""
    own = {"pid": trace.rank + 1, "tid": _PHASE_ROW}  # Perfetto treats process 0 as the idle one
    for kind, name in (("process", f"rank {trace.rank} on {trace.host}"), ("thread", "phases of the step")):
        yield own | {"ph": "M", "name": f"{kind}_name", "args": {"name": name}}
    for (_, since), (phase, now) in pairwise(trace.laps):
        span = {"ph": "X", "name": phase, "cat": "phase", "ts": (since - start_ns) / 1000, "dur": (now - since) / 1000}
        yield own | span
    whole = json.loads(gzip.decompress(trace.packed))
    shift_us = (whole.get("baseTimeNanoseconds", 0) - start_ns) / 1000
    for event in whole["traceEvents"]:
        kept = event["ph"] != "M" or event["name"] == "thread_name"
        if not kept or not isinstance(event["pid"], int):  # the profiler's own marks have a name as pid
            continue
        if "id" in event:  # of an arrow: ids are unique only within a rank
            event["id"] = f"{trace.rank}.{event['id']}"
        yield event | {"pid": own["pid"], "ts": round(event["ts"] + shift_us, 3)}
