"""Makes timelines in the format of Horovod's writer, with given figures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = (
    '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1795285774578916}},\n'
)


@dataclass
class Timeline:
    """Grows like a real file: a tensor's metadata before its first event, no line breaks between events."""

    text: str = START + '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
    pids: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def event(self, phase: str, ts: int, tensor: str = "", name: str = "", **more: Any) -> None:
        """Add an event. `more`: fields after the pid."""
        if tensor and tensor not in self.pids:
            self.pids[tensor] = pid = len(self.pids) + 1
            for kind, args in (("process_name", {"name": tensor}), ("process_sort_index", {"sort_index": pid})):
                self.text += json.dumps({"name": kind, "ph": "M", "pid": pid, "args": args}) + ",\n"
        event: dict[str, Any] = {"ph": phase} | ({"name": name} if name else {}) | {"ts": ts}
        event |= ({"pid": self.pids[tensor]} if tensor else {}) | more
        self.text += json.dumps(event) + ","
        self.events.append(event)

    def negotiate(self, tensor: str, ready: dict[int, int] | tuple[int, int], what: str = "ALLREDUCE") -> None:
        """Add a negotiation. `ready`: time of each rank, or of the first and the last as with the response cache."""
        ticks = sorted(ready.items(), key=lambda item: item[1]) if isinstance(ready, dict) else []
        first, last = (ticks[0][1], ticks[-1][1]) if ticks else ready
        self.event("B", first, tensor, f"NEGOTIATE_{what}")
        for rank, ts in ticks:
            self.event("X", ts, tensor, str(rank), dur=0)
        self.event("E", last, tensor)

    def send(
        self,
        tensors: list[str],
        start: int,
        end: int,
        library: str = "MPI_ALLREDUCE",
        shape: tuple[int, ...] = (256, 1024),
        what: str = "ALLREDUCE",
    ) -> None:
        """Add a message. With several tensors it has copies of 10 us at both ends."""
        copy = 10 if len(tensors) > 1 else 0
        for tensor in tensors:
            self.event("B", start, tensor, what)
        spans = [("MEMCPY_IN_FUSION_BUFFER", start, start + copy), (library, start + copy, end - copy)]
        for name, begin, over in [*spans, ("MEMCPY_OUT_FUSION_BUFFER", end - copy, end)]:
            if copy or name == library:
                for tensor in tensors:
                    self.event("B", begin, tensor, name)
                for tensor in tensors:
                    self.event("E", over, tensor)
        for tensor in tensors:
            self.event("E", end, tensor, args={"dtype": "float32", "shape": str(list(shape))})

    def write(self, path: Path, end: str = "]") -> Path:
        """Write the file, with `end` in place of the last comma."""
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
) -> Timeline:
    """Steps of three tensors of 1 MiB: a and b are sent together in 20 ms, then c in 10 ms.

    a is ready at 20 ms of the step, b at 30, c at 60. a and b are sent from 30 to 50, c from 60 to 70, so 20 of 30 ms
    are hidden and 10 exposed. Rank `straggler` is `by` us later, and so is everything after it.
    """
    made = Timeline()
    for tensor in ("w", "v"):
        made.negotiate(f"broadcast.{tensor}", dict.fromkeys(range(ranks), 1000), "BROADCAST")
        made.send([f"broadcast.{tensor}"], 1000, 2000, library.replace("ALLREDUCE", "BCAST"), what="BROADCAST")
    for step in range(steps):
        start = 1_000_000 + step * (step_us + by)

        def ready(ms: int, start: int = start) -> dict[int, int] | tuple[int, int]:
            moment = start + ms * 1000
            if cached:
                return moment, moment + by
            return {rank: moment + (by if rank == straggler else 0) for rank in range(ranks)}

        made.negotiate("allreduce.a", ready(20))
        made.negotiate("allreduce.b", ready(30))
        made.send(["allreduce.a", "allreduce.b"], start + by + 30_000, start + by + 50_000, library)
        made.negotiate("allreduce.c", ready(60))
        made.send(["allreduce.c"], start + by + 60_000, start + by + 70_000, library)
    return made
