"""Metrics and progress of a run, from rank 0: metrics.jsonl, TensorBoard, terminal."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # torch's SummaryWriter is slow to import
from tqdm import tqdm

from hvd_bert.distributed.logs import log
from hvd_bert.storage import written
from hvd_bert.storage.writing import JsonLines

# Minimum time between progress lines without a terminal (a job's log file, a launcher's pipe).
LINE_EVERY_S = 10.0


class MetricsLogger:
    """Records metrics and shows progress. On ranks other than 0 (`enabled` false) every method does nothing."""

    def __init__(self, folder: Path, enabled: bool, resumed_step: int | None = None, unit: str = "windows") -> None:
        """`resumed_step`: TensorBoard discards values of later steps. `unit`: what a step takes, for messages.

        Raises OSError if a file cannot be written.
        """
        self.enabled, self.unit = enabled, unit
        self.step = self.first_step = self.total_steps = 0
        self.steps_per_epoch = 1
        if not enabled:
            return
        written.add(folder, "metrics.jsonl", "tb")
        self.jsonl = JsonLines(folder / "metrics.jsonl")
        self.board: Any = EventFileWriter(str(folder / "tb"))
        self._board_failed = False
        if resumed_step is not None:
            self._add_event(resumed_step + 1, session_log=SessionLog(status=SessionLog.START))
        self.bar = tqdm(disable=True)

    def begin(self, total_steps: int, step: int, steps_per_epoch: int) -> None:
        """Training starts. `step`: how many of the `total_steps` steps are done, if it resumes."""
        self.total_steps = total_steps
        self.step = self.first_step = step
        self.steps_per_epoch = steps_per_epoch
        self.start = self.last_line = time.monotonic()
        if self.enabled:
            shown = sys.stderr.isatty()
            self.bar = tqdm(total=total_steps, initial=step, unit="step", disable=not shown, dynamic_ncols=True)

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Record and show a step's metrics (keys: docs/reference/output-files.md)."""
        self.step = step
        if self.enabled:
            self._record(step, metrics)
            self._show_progress(metrics)

    def evaluated(self, metrics: dict[str, float], summary: str, step: int) -> None:
        """Record an evaluation of the model of step `step`, and show its `summary`."""
        if not self.enabled:
            return
        named = {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
        self._record(step, {"epoch": step / self.steps_per_epoch, **named})
        after = f"step {step}/{self.total_steps}: " if step else ""
        log.info(f"{after}{summary}")

    def _record(self, step: int, values: dict[str, float]) -> None:
        # An overflow (fp16) may leave an infinite norm, which JSON cannot hold.
        row = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.jsonl.write({"step": step, **row})
        scalars = dict(_scalar(name, value) for name, value in values.items())
        # One event for all values: add_scalar would write one per value and take that many times longer.
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])
        try:
            self._add_event(step, summary=summary)
        except OSError as error:  # of the library's thread, which has ended
            if not self._board_failed:
                log.warning("TensorBoard's file cannot be written: %s. Training continues.", error.strerror or error)
            self._board_failed = True

    def _add_event(self, step: int, **content: Any) -> None:
        self.board.add_event(Event(wall_time=time.time(), step=step, **content))

    def _show_progress(self, metrics: dict[str, float]) -> None:
        shown = {
            "loss": f"{metrics['loss']:.3f}",
            "lr": f"{metrics['learning_rate']:.2e}",
            f"{self.unit}/s": f"{metrics['windows_per_s']:.1f}",
        }
        now = time.monotonic()
        if not self.bar.disable:
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update(self.step - self.bar.n)
        elif now - self.last_line >= LINE_EVERY_S or self.step in (1, self.total_steps):
            self.last_line = now
            done = self.step - self.first_step
            eta = tqdm.format_interval((now - self.start) / done * (self.total_steps - self.step))
            values = "  ".join(f"{name} {value}" for name, value in shown.items())
            log.info(f"step {self.step}/{self.total_steps} ({self.step / self.total_steps:.0%})  {values}  ETA {eta}")

    def close(self) -> None:
        """Flush and close the files."""
        if self.enabled:
            self.bar.close()
            with suppress(OSError):  # `_record` has warned
                self.board.close()
            self.jsonl.close()


def _scalar(name: str, value: float) -> tuple[str, float]:
    """A metric's tag and value for TensorBoard, which groups tags by the word before the slash."""
    if name.endswith("_share"):
        return f"share/{name.removesuffix('_share')}", value
    if name.endswith("_s") and not name.endswith("_per_s"):
        return f"time_ms/{name.removesuffix('_s')}", 1000 * value
    group = "eval" if name.startswith("eval_") else "train"
    return f"{group}/{name.removeprefix('eval_')}", value
