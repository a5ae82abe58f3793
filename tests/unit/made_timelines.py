"""Make timelines with given times, in the format that Horovod writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = (
    '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1795285774578916}},\n'
)


class MadeTimeline:
    """A timeline as Horovod writes it: a tensor's metadata precedes its events, and no line breaks separate events."""

    def __init__(self) -> None:
        self.text = START + '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
        self.pids: dict[str, int] = {}

    def event(self, phase: str, ts: int, tensor: str, name: str = "", **more: Any) -> None:
        """Add an event, and metadata before a tensor's first event.

        `phase`: the trace format's "ph". `ts`: microseconds. `more`: fields after the pid.
        """
        if tensor not in self.pids:
            self.pids[tensor] = pid = len(self.pids) + 1
            for kind, args in (("process_name", {"name": tensor}), ("process_sort_index", {"sort_index": pid})):
                self.text += json.dumps({"name": kind, "ph": "M", "pid": pid, "args": args}) + ",\n"
        event = {"ph": phase} | ({"name": name} if name else {}) | {"ts": ts, "pid": self.pids[tensor]} | more
        self.text += json.dumps(event) + ","

    def negotiate(
        self, tensor: str, first: int, last: int = 0, ranks: Sequence[int] = (), collective: str = "ALLREDUCE"
    ) -> None:
        """Add a negotiation. The final rank of `ranks` is ready at `last`, the others at `first` (in microseconds)."""
        last = last or first
        self.event("B", first, tensor, f"NEGOTIATE_{collective}")
        for rank in ranks:
            self.event("X", last if rank == ranks[-1] else first, tensor, str(rank), dur=0)
        self.event("E", last, tensor)

    def send(
        self, tensors: str, start: int, end: int, library: str = "MPI_ALLREDUCE", shape: Any = (256, 1024)
    ) -> None:
        """Add a message. `tensors`: one-letter names. Two or more go through the fusion buffer: 10 us in, 10 us out."""
        copy, collective = 10 if len(tensors) > 1 else 0, library.split("_")[1].replace("BCAST", "BROADCAST")
        spans = [("MEMCPY_IN_FUSION_BUFFER", start, start + copy), (library, start + copy, end - copy)]
        spans.append(("MEMCPY_OUT_FUSION_BUFFER", end - copy, end))
        for tensor in tensors:
            self.event("B", start, tensor, collective)
        for name, begin, over in spans if copy else spans[1:2]:
            for phase, ts in (("B", begin), ("E", over)):
                for tensor in tensors:
                    self.event(phase, ts, tensor, name if phase == "B" else "")
        for tensor in tensors:
            self.event("E", end, tensor, args={"dtype": "float32", "shape": str(list(shape))})

    def write(self, path: Path, end: str = "]") -> Path:
        """Write the file, with `end` in place of the final comma. Returns `path`."""
        path.write_text(self.text.removesuffix(",") + end, encoding="utf-8")
        return path


def training(
    steps: int = 12,
    ranks: int = 2,
    straggler: int | None = None,
    by: int = 0,
    cached: bool = False,
    step_us: int = 100_000,
    library: str = "MPI_ALLREDUCE",
) -> MadeTimeline:
    """Make the timeline of a training whose steps send three tensors of 1 MiB: a and b in one message, then c.

    a is ready 20 ms after the step's start, b after 30 ms, c after 60 ms. a and b are sent from 30 to 50 ms, c from 60
    to 70 ms: 20 ms of communication overlap and 10 ms are exposed. `straggler`: the rank that is `by` us late in each
    step (default: the highest rank), which delays all later events. `cached`: negotiations do not name the ranks.
    """
    made = MadeTimeline()
    order = sorted(range(ranks), key=lambda rank: rank == straggler)
    for tensor in "wv":
        made.negotiate(tensor, 1000, ranks=order, collective="BROADCAST")
        made.send(tensor, 1000, 2000, library.replace("ALLREDUCE", "BCAST"))
    for start in range(1_000_000, 1_000_000 + steps * (step_us + by), step_us + by):
        for tensor, ready in (("a", start + 20_000), ("b", start + 30_000), ("c", start + 60_000)):
            made.negotiate(tensor, ready, ready + by, () if cached else order)
            if tensor == "b":
                made.send("ab", start + by + 30_000, start + by + 50_000, library)
        made.send("c", start + by + 60_000, start + by + 70_000, library)
    return made
