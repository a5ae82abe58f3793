"""TensorBoard reporter: writes scalars, hyperparameters and sample answers to event files."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from hvd_bert.output.reporters.base import Reporter, Samples, Settings

FOLDER = "tb"


class TensorBoard(Reporter):
    title = "TensorBoard's file"

    def __init__(self, folder: Path) -> None:
        """Create an event file. Raises OSError."""
        (folder / FOLDER).mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names, so the time comes first. RecordWriter is used because
        # TensorBoard's EventFileWriter writes in a thread and raises errors only later.
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        self._writer = RecordWriter((folder / FOLDER / name).open("xb"))
        self._add(0, file_version="brain.Event:2")

    def resumed(self, step: int) -> None:
        self._add(step + 1, session_log=SessionLog(status=SessionLog.START))  # TensorBoard then discards later steps

    def settings(self, settings: Settings) -> None:
        self._add(0, summary=hparams_pb(dict(settings)))

    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        # A single event for all values is faster than one event per value, as add_scalar writes.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step, summary=Summary(value=values))

    def samples(self, step: int, samples: Samples) -> None:
        text = "\n\n".join(map(_as_code, samples))
        self._add(step, summary=text_pb("eval/samples", text))

    def close(self, finished: bool) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        self._writer.flush()


def _as_code(sample: Mapping[str, Any]) -> str:
    """Format a sample as a Markdown code block, so that TensorBoard shows its text unchanged."""
    lines = {name: " | ".join(value) if isinstance(value, list) else str(value) for name, value in sample.items()}
    return "\n".join(f"    {name:<12} {' '.join(text.split())}" for name, text in lines.items())
