"""Settings of recordings of steps, and of the peak for the MFU."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from hvd_bert.config.flag import flag, require

DISTORTS_TIMES = "recording would distort the measured times"


@dataclass
class ProfilingArguments:
    # horovodrun on Python 3.11 refuses --timeline, even after the program's name: it is the prefix of two of its flags.
    timeline: str | None = flag(
        "profiling",
        None,
        "Record Horovod's timeline of --timeline_steps in this file; under horovodrun write --timeline_file.",
        default_text="no recording",
        aliases=("--timeline_file", "--timeline-file"),
        metavar="FILE",
        may_change_on_resume=True,
        sweep_hint=DISTORTS_TIMES,
    )
    timeline_steps: str = flag(
        "profiling",
        "11:30",
        "First and last step to record, both included.",
        metavar="FIRST:LAST",
        may_change_on_resume=True,
    )
    timeline_mark_cycles: bool = flag(
        "profiling", False, "Mark the cycles of Horovod's background thread in the timeline.", may_change_on_resume=True
    )
    profile: bool = flag(
        "profiling",
        False,
        "Record --timeline_steps with torch's profiler: trace.json.gz of all ranks in --output_dir.",
        may_change_on_resume=True,
        sweep_hint=DISTORTS_TIMES,
    )
    peak_tflops: float | None = flag(
        "profiling",
        None,
        "Peak TFLOP/s of one device in this training's precision, for the MFU.",
        default_text="the vendor's figure for known GPUs, none for CPUs",
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        fits = re.fullmatch(r"[1-9][0-9]{0,8}:[1-9][0-9]{0,8}", self.timeline_steps) and self._steps()
        require(bool(fits), f"--timeline_steps {self.timeline_steps}: give the first and the last step, as in 11:30.")
        unused = self.timeline_mark_cycles and not (self.timeline or self.profile)
        require(not unused, "--timeline_mark_cycles needs a recording: give --timeline_file FILE.")
        peak = self.peak_tflops
        require(
            peak is None or (math.isfinite(peak) and peak > 0),
            f"--peak_tflops {peak}: must be a positive, finite number.",
        )

    def _steps(self) -> range:
        first, last = self.timeline_steps.split(":")
        return range(int(first), int(last) + 1)

    @property
    def steps_to_record(self) -> range:
        """The steps (1, 2, ...) to record; empty without --timeline_file and --profile."""
        return self._steps() if self.timeline or self.profile else range(0)
