"""Skipped steps, jumps of the loss and an infinite loss on a run's page, with the windows of their batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_bert.rendering.page import DASH, Block, Grid, Text
from hvd_bert.tools.runs.record import Record, number_of

WORDS = {
    "skipped_step": "skipped: no finite gradient",
    "loss_jump": "jump of the loss",
    "infinite_loss": "no finite loss, but a finite gradient",
}
MAX_ROWS, MAX_NAMES = 50, 8


def of_run(record: Record) -> list[Block]:
    """A table of the last events; empty without any."""
    rows = [_row(event) for event in record.numeric_events[-MAX_ROWS:]]
    if not rows:
        return []
    left_out = len(record.numeric_events) - len(rows)
    note = "The ranks are those whose loss is not finite, or the highest first. events.jsonl has all windows."
    if left_out:
        note += f" {left_out} earlier events are not shown."
    return [Grid(["step", "event", "loss", "mean before", "rank", "windows of that rank"], rows, words=6), Text(note)]


def _row(event: Mapping[str, Any]) -> list[str]:
    batch = event.get("batch")
    parts = [part for part in batch if isinstance(part, dict)] if isinstance(batch, list) else []
    first: Mapping[str, Any] = parts[0] if parts else {}
    recorded = first.get("windows")
    windows = [str(name) for name in recorded] if isinstance(recorded, list) else []
    more = f" and {len(windows) - MAX_NAMES} more" if len(windows) > MAX_NAMES else ""
    jump = [_number(event.get(key)) for key in ("loss", "mean")]
    return [
        str(event.get("step", DASH)),
        WORDS[str(event["event"])],
        *jump,
        str(first.get("rank", DASH)),
        ", ".join(windows[:MAX_NAMES]) + more or DASH,
    ]


def _number(value: Any) -> str:
    number = number_of(value)
    return DASH if number is None else f"{number:.4g}"
