"""Figures of a training: rates and shares per section of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from hvd_bert.model.precision import autocast, evaluating
from hvd_bert.monitoring import PHASES
from hvd_bert.output.callback import Callback
from hvd_bert.tasks.base import Task


class Recorder(Callback):
    """Keeps a training's metrics in memory: the rows of metrics.jsonl."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append({"step": step, **metrics})


def section_figures(row: dict[str, float], flop: Sequence[float | None]) -> dict[str, float]:
    """The figures of one section. `row`: as logged at its end. `flop`: of each of its steps; None if unknown."""
    logged = ("windows_per_s", "tokens_per_s", "step_s", "mfu")
    figures: dict[str, float] = {name: row[name] for name in logged if name in row}
    counts = [count for count in flop if count is not None]
    if counts:
        figures["useful_gflops"] = sum(counts) / (row["step_s"] * len(counts)) / 1e9
    return figures | {f"{phase}_share": row[f"{phase}_s"] / row["step_s"] for phase in PHASES if f"{phase}_s" in row}


def spread(sections: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum over the sections, per figure."""
    columns = {name: [section[name] for section in sections] for name in sections[0]}
    return {name: {"median": median(c), "least": min(c), "most": max(c)} for name, c in columns.items()}


def padding_share(rows: list[dict[str, float]]) -> float:
    """Share of padding in the computed positions, over all ranks and sections. `rows`: as logged at their ends."""
    tokens = [row["tokens_per_s"] * row["step_s"] for row in rows]
    positions = [count / (1 - row["padding_share"]) for count, row in zip(tokens, rows, strict=True)]
    return 1 - sum(tokens) / sum(positions)


def evaluation_rate(task: Task, steps: range, device: torch.device, precision: str) -> float:
    """Windows/s of these steps' batches in passes without gradients, in a world of 1."""
    assert task.plan is not None
    batches = [task.batch(ids) for step in steps for ids in task.plan.rank_windows(step, 0)]
    with evaluating(task.model), autocast(device, precision):
        for timed in (batches[:1], batches):  # the first one warms up
            _wait(device)
            start = time.perf_counter()
            for batch in timed:
                task.losses(task.model, batch)
            _wait(device)
    return sum(batch.num_windows for batch in batches) / (time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
