"""Record steps A to B of a training: Horovod's timeline on rank 0, torch's profiler on every rank.

Horovod can start a timeline during training only if HOROVOD_TIMELINE=DYNAMIC was set when it was initialized
(`hvd_bert.distributed.horovod_world`). A recording that is interrupted is closed with the steps it has.
"""

from __future__ import annotations

import errno
import gzip
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

from hvd_bert.config.settings import ProfilingArguments
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError, log
from hvd_bert.storage.writing import check_folder, is_special, make_folder, replacing, writing_to

TRACE = "trace.json.gz"
_PHASE_ROW = 0  # a row number that no thread has


@dataclass
class RankTrace:
    """The recording of a rank. `laps`: the start, then the end of each phase, in ns since 1970. `packed`: torch's
    trace, gzipped."""

    rank: int
    host: str
    laps: Sequence[tuple[str, int]]
    packed: bytes


class Recording:
    """Called before and after each step; starts at the first step to record and stops after the last."""

    def __init__(self, config: ProfilingArguments, total_steps: int, meter: Any, world: World, replaces: bool) -> None:
        """A collective. Raises CollectiveError if the file cannot be written or the run has no such steps.

        `meter`: a `Meter`, which splits a step into phases. `replaces`: whether the file may exist, as an earlier start
        of the run left it.
        """
        self.config, self.meter, self.world = config, meter, world
        wanted = self.config.steps_to_record
        self.steps = range(wanted.start, min(wanted.stop, total_steps + 1))
        self.file = Path(config.timeline) if config.timeline else None  # Horovod's timeline
        self.running = False
        self.profiler: torch.profiler.profile | None = None
        self.laps: list[tuple[str, int]] = []
        with world.raise_on_all_ranks():
            if wanted and not self.steps:
                flag = f"--timeline_steps {self.config.timeline_steps}"
                raise UserError(f"{flag}: this run has only {total_steps} steps. Choose some of them.")
            if self.file and world.size == 1:
                raise UserError(
                    "--timeline_file: a single rank sends no gradients. Start more ranks, or use --profile instead."
                )
            if self.file and world.rank == 0:
                _check_file(self.file, replaces)

    def before(self, step: int) -> None:
        """Call before step `step` (1, 2, ...). A collective before the first step to record."""
        if self.running or step not in self.steps:
            return
        self.running, self.steps = True, range(step, self.steps[-1] + 1)
        if self.config.profile:
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.file and self.world.rank == 0:
            with suppress(OSError):  # then the file is missing later
                make_folder(self.file.parent)
            self.world.start_timeline(self.file)
        self.world.allgather(None)  # no rank sends a gradient before rank 0 records it
        self.meter.lap("other")
        if self.profiler:
            started_ns = time.time_ns() - time.perf_counter_ns()  # the clock may be set back meanwhile
            self.laps.append(("", started_ns + time.perf_counter_ns()))
            self.meter.on_lap = lambda phase: self.laps.append((phase, started_ns + time.perf_counter_ns()))

    def _stop(self) -> None:
        self.running = False
        self.meter.on_lap = None
        if self.file and self.world.rank == 0:
            self.world.stop_timeline()
        if self.profiler:
            self.profiler.stop()

    def after(self, step: int, folder: Path) -> None:
        """Call after step `step`. A collective after the last step to record. `folder`: for the trace."""
        if not self.running or step != self.steps[-1]:
            return
        self._stop()
        self.world.allgather(None)  # no rank continues before rank 0 has closed the file
        steps = f"steps {self.steps[0]} to {self.steps[-1]}"
        if self.file and self.world.rank == 0 and not self.file.exists():
            log.warning("%s: the timeline could not be written. Training continues.", self.file)
        elif self.file:
            log.info("Horovod's timeline of %s: %s. To analyze it: hvd-bert timeline %s", steps, *[self.file] * 2)
        if self.profiler:
            traces = [trace for trace in self.world.gather(self._my_trace()) if trace]
            if self.world.rank == 0:
                try:
                    write_trace(path := folder / TRACE, traces)
                except (OSError, ValueError) as error:
                    log.warning("The trace of %s could not be written: %s. Training continues.", steps, error)
                else:
                    log.info("Trace of all ranks in %s: %s, for ui.perfetto.dev or chrome://tracing", steps, path)
        self.profiler = None

    def _my_trace(self) -> RankTrace | None:
        """This rank's trace; None if it could not be written, as training continues without it."""
        assert self.profiler is not None
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self.profiler.export_chrome_trace(str(path))
                return RankTrace(self.world.rank, self.world.host, self.laps, gzip.compress(path.read_bytes(), 1))
        except (OSError, RuntimeError) as error:
            log.warning("The trace lacks this rank: %s", error)
            return None

    def close(self) -> None:
        """Close an unfinished recording when the training ends. Not a collective, so there is no trace of all ranks."""
        if not self.running:
            return
        self._stop()
        log.info("The recording of steps %s is incomplete: training was interrupted.", self.config.timeline_steps)


def _check_file(path: Path, replaces: bool) -> None:
    """Raise UserError if the timeline cannot be written."""
    with writing_to("--timeline_file", path):
        check_folder(path.parent)
        if is_special(path) or path.is_dir():
            raise OSError(errno.EINVAL, "it is a folder, a link, a pipe or a device: name a file")
        if path.exists():
            if not replaces:
                raise FileExistsError(errno.EEXIST, "it exists: name another file, or add --overwrite_output_dir")
            path.open("ab").close()


# The trace, for Perfetto and chrome://tracing: a process per rank, by its host's clock, with a row of the phases of its
# steps and torch's rows of its threads and GPU streams. The format: Google, Trace Event Format, 2016.


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
        if "id" in event:  # an arrow's id is unique only within a rank
            event["id"] = f"{trace.rank}.{event['id']}"
        yield event | {"pid": own["pid"], "ts": round(event["ts"] + shift_us, 3)}
