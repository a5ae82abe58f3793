"""Record steps A to B of a training: Horovod's timeline on rank 0, torch's profiler on every rank.

Horovod can start a timeline during training only if HOROVOD_TIMELINE=DYNAMIC was set when it was initialized
(`hvd_bert.distributed.horovod_world`). A recording that is interrupted is closed with the steps it has.
"""

from __future__ import annotations

import errno
import json
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import distributed
from torch.profiler import ProfilerAction, profile, record_function

from hvd_bert.config.settings import ProfilingArguments
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError, log
from hvd_bert.storage.writing import check_folder, is_special, make_folder, write_named, writing_to

TRACE = "trace"  # the folder of the traces; Holistic Trace Analysis reads all files in it


class Recording:
    """Called before and after each step; starts at the first step to record and stops after the last."""

    def __init__(self, config: ProfilingArguments, total_steps: int, meter: Any, world: World, replaces: bool) -> None:
        """A collective. Raises CollectiveError if the file cannot be written or the run has no such steps.

        `meter`: a `Meter`, which splits a step into phases. `replaces`: whether an earlier start of the run may have
        left the file.
        """
        self.config, self.meter, self.world = config, meter, world
        wanted = self.config.steps_to_record
        self.steps = range(wanted.start, min(wanted.stop, total_steps + 1))
        self.file = Path(config.timeline) if config.timeline else None  # Horovod's timeline
        self.running = False
        self.profiler: profile | None = None
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
        if self.running and self.profiler:
            self.profiler.step()
        if self.running or step not in self.steps:
            return
        self.running, self.steps = True, range(step, self.steps[-1] + 1)
        if self.config.profile:
            self.profiler = profile(schedule=lambda _: ProfilerAction.RECORD)  # a schedule marks the steps
            self.profiler.start()
            self.meter.annotate = record_function
            if not distributed.is_initialized():  # else torch has added it
                info = {"rank": self.world.rank, "world_size": self.world.size}
                self.profiler.add_metadata_json("distributedInfo", json.dumps(info))
        if self.file and self.world.rank == 0:
            with suppress(OSError):  # `after` warns that the file is missing
                make_folder(self.file.parent)
            self.world.start_timeline(self.file)
        self.world.allgather(None)  # no rank sends a gradient before rank 0 records it
        self.meter.end_interval("other")

    def _stop(self) -> None:
        self.running = False
        self.meter.annotate = nullcontext
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
            self._write_traces(folder / TRACE, steps)
        self.profiler = None

    def _write_traces(self, folder: Path, steps: str) -> None:
        """Write the trace of each rank on rank 0, which may be the only one that can. A collective."""
        traces = self.world.gather(self._my_trace())
        if self.world.rank == 0:
            try:
                folder.mkdir(exist_ok=True)
                for earlier in folder.glob("rank-*.json.gz"):  # an earlier start may have had more ranks
                    earlier.unlink()
                for rank, trace in enumerate(traces):
                    if trace:
                        write_named(folder / f"rank-{rank}.json.gz", trace)
            except (OSError, ValueError) as error:
                log.warning("The traces of %s could not be written: %s. Training continues.", steps, error)
            else:
                log.info("Traces of %s, one per rank, for ui.perfetto.dev: %s", steps, folder)

    def _my_trace(self) -> bytes:
        """This rank's trace, gzipped; empty if it could not be written."""
        assert self.profiler is not None
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json.gz"
                self.profiler.export_chrome_trace(str(path))
                return path.read_bytes()
        except (OSError, RuntimeError) as error:
            log.warning("The trace of this rank is missing: %s", error)
            return b""

    def close(self) -> None:
        """Close an unfinished recording when the training ends. Not a collective, so there are no traces."""
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
