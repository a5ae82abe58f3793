"""A rank of many_ranks.py: `python -m hvd_bert.train`, which also writes what it used until when.

    python many_ranks_rank.py FOLDER [trainer's arguments...]

Writes FOLDER/RANK.json: usage when the world is joined, at the first step's vote, and at the last one.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from hvd_bert.startup import collector_paused

CALLS = ("allgather", "gather", "sum", "broadcast_tensors")
counts: Counter[str] = Counter()
marks: list[dict[str, Any]] = []
inside = False  # a collective that is made of others counts once


def note_open(event: str, arguments: tuple[Any, ...]) -> None:
    """Count the files that Python opens."""
    counts["opened"] += event == "open"


def mark(name: str) -> None:
    """Record this process's usage until now."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    usage = {"time": time.time(), "cpu_s": sum(os.times()[:2]), "pss_mib": kib["Pss"] / 1024}
    held = {"threads": len(os.listdir("/proc/self/task")), "descriptors": len(os.listdir("/proc/self/fd"))}
    marks.append({"mark": name, **usage, **held, **counts})


def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that counts its calls."""

    @wraps(call)
    def counting(*arguments: Any, **options: Any) -> Any:
        global inside
        if inside:
            return call(*arguments, **options)
        inside = True
        counts["collectives"] += 1
        counts[name] += 1
        try:
            return call(*arguments, **options)
        finally:
            inside = False

    return counting


def watch(folder: Path) -> None:
    """Have Horovod's world count and record."""
    with collector_paused():
        from hvd_bert.distributed.horovod_world import HorovodWorld

    set_up, vote, end = HorovodWorld.set_up_device, HorovodWorld.any_rank_async, HorovodWorld.end
    for name in CALLS:
        setattr(HorovodWorld, name, counted(name, getattr(HorovodWorld, name)))

    def joined(self: HorovodWorld) -> None:
        mark("joined")
        set_up(self)

    def voted(self: HorovodWorld, mine: bool) -> Callable[[], bool]:
        if len(marks) == 1:
            mark("first_step")
        counts["votes"] += 1
        return vote(self, mine)

    def ended(self: HorovodWorld, status: int) -> None:
        mark("end")
        (folder / f"{self.rank}.json").write_text(json.dumps(marks), encoding="utf-8")
        end(self, status)

    HorovodWorld.set_up_device, HorovodWorld.any_rank_async = joined, voted  # type: ignore[method-assign]
    HorovodWorld.end = ended  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    sys.addaudithook(note_open)
    watch(Path(sys.argv.pop(1)))
    runpy.run_module("hvd_bert.train", run_name="__main__", alter_sys=True)
