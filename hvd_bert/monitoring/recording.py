"""Recording of the steps in --timeline_steps: Horovod's timeline on rank 0, torch's profiler on every rank.

Horovod can start a timeline during training only if HOROVOD_TIMELINE=DYNAMIC was set when it was initialized
(`hvd_bert.distributed.horovod_world`).
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

TRACE = "trace"  # folder of torch's traces; Holistic Trace Analysis reads all files in it, so it holds nothing else


class Recording:
    """Starts recording before the first step in --timeline_steps and stops after the last."""

    def __init__(self, config: ProfilingArguments, total_steps: int, meter: Any, world: World, replaces: bool) -> None:
        """Check the settings. A collective.

        Raises CollectiveError if the timeline cannot be written, if it is requested for a single rank, or if the
        training has none of the steps to record. `meter`: the training's `Meter`, which marks the phases in the trace.
        `replaces`: whether an existing timeline may be replaced: if the run was started before, or with
        --overwrite_output_dir.
        """
        self.config, self.meter, self.world = config, meter, world
        wanted = self.config.steps_to_record
        self.steps = range(wanted.start, min(wanted.stop, total_steps + 1))
        self.file = Path(config.timeline) if config.timeline else None  # the file of Horovod's timeline
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
        """Start recording if `step` (1, 2, ...) is the first step to record. Call this before each step.

        A collective at that step only.
        """
        if self.running and self.profiler:
            self.profiler.step()
        if self.running or step not in self.steps:
            return
        self.running, self.steps = True, range(step, self.steps[-1] + 1)
        if self.config.profile:
            self.profiler = profile(schedule=lambda _: ProfilerAction.RECORD)  # steps are marked only with a schedule
            self.profiler.start()
            self.meter.annotate = record_function
            if not distributed.is_initialized():  # otherwise torch adds this itself
                info = {"rank": self.world.rank, "world_size": self.world.size}
                self.profiler.add_metadata_json("distributedInfo", json.dumps(info))
        if self.file and self.world.rank == 0:
            with suppress(OSError):  # `after` warns that the file is missing
                make_folder(self.file.parent)
            self.world.start_timeline(self.file)
        self.world.allgather(None)  # wait, so that no rank sends gradients before rank 0 records
        self.meter.end_interval("other")

    def _stop(self) -> None:
        self.running = False
        self.meter.annotate = nullcontext
        if self.file and self.world.rank == 0:
            self.world.stop_timeline()
        if self.profiler:
            self.profiler.stop()

    def after(self, step: int, folder: Path) -> None:
        """Stop and write the recording if `step` is the last step to record. Call this after each step.

        A collective at that step only. `folder`: the output folder, for the traces.
        """
        if not self.running or step != self.steps[-1]:
            return
        self._stop()
        self.world.allgather(None)  # wait, so that no rank continues before rank 0 has closed the file
        steps = f"steps {self.steps[0]} to {self.steps[-1]}"
        if self.file and self.world.rank == 0 and not self.file.exists():
            log.warning("%s: the timeline could not be written. Training continues.", self.file)
        elif self.file:
            log.info("Horovod's timeline of %s: %s. To analyze it: hvd-bert timeline %s", steps, *[self.file] * 2)
        if self.profiler:
            self._write_traces(folder / TRACE, steps)
        self.profiler = None

    def _write_traces(self, folder: Path, steps: str) -> None:
        """Write all ranks' traces on rank 0, since other hosts may not have the output folder. A collective."""
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
        """Return this rank's gzipped trace; empty if torch could not export it."""
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
        """Stop an unfinished recording when training ends. Discards the traces: gathering them is a collective."""
        if not self.running:
            return
        self._stop()
        log.info("The recording of steps %s is incomplete: training was interrupted.", self.config.timeline_steps)


def _check_file(path: Path, replaces: bool) -> None:
    """Raise UserError if the timeline cannot be written to `path`. `replaces`: whether the file may exist."""
    with writing_to("--timeline_file", path):
        check_folder(path.parent)
        if is_special(path) or path.is_dir():
            raise OSError(errno.EINVAL, "it is a folder, a link, a pipe or a device: name a file")
        if path.exists():
            if not replaces:
                raise FileExistsError(errno.EEXIST, "it exists: name another file, or add --overwrite_output_dir")
            path.open("ab").close()
