"""Charts of what one run or several runs recorded over their steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np

from hvd_bert.monitoring import PHASES
from hvd_bert.rendering.charts import Chart, Series
from hvd_bert.tools.report.content import SHORT
from hvd_bert.tools.runs.record import Record

PHASE_NAMES = {"exposed_comm": "exposed communication", "data": "waiting for data", "compute": "forward and backward"}


def of_run(record: Record) -> list[Chart]:
    """Loss, scores, learning rate, gradient norm and throughput of one run, as far as recorded."""
    losses = [_series(record, "loss", "training", 0), _series(record, "eval_loss", "validation", 1)]
    scores = [_series(record, f"eval_{name}", score_name(name), place) for place, name in enumerate(record.score_names)]
    charts = [_chart("Loss", "loss", losses)]
    if len(record.evaluations) > 1:  # one evaluation is no curve
        charts.append(_chart("Scores", "score", scores))
    return [chart for chart in [*charts, *_of_training([record])] if chart.series]


def of_runs(records: Sequence[Record]) -> list[Chart]:
    """The same of several runs: a chart per figure, with a curve per run that recorded it."""
    charts = [_chart("Training loss", "loss", _of(records, "loss"))]
    if any(len(record.evaluations) > 1 for record in records):
        charts.append(_chart("Validation loss", "loss", _of(records, "eval_loss")))
        names = dict.fromkeys(name for record in records for name in record.score_names)
        charts += [_chart(score_name(name), score_name(name), _of(records, f"eval_{name}")) for name in names]
    return [chart for chart in [*charts, *_of_training(records)] if chart.series]


def _of_training(records: Sequence[Record]) -> list[Chart]:
    return [
        _chart("Learning rate", "learning rate", _of(records, "learning_rate")),
        _chart("Gradient norm before clipping", "norm", _of(records, "grad_norm")),
        _chart("Throughput", f"{records[0].unit}/s", _of(records, "windows_per_s")),
    ]


def _chart(title: str, unit: str, series: Iterable[Series | None]) -> Chart:
    return Chart(title, "step", unit, [found for found in series if found])


def score_name(name: str) -> str:
    """A score's name for tables and charts."""
    return SHORT.get(name, name.replace("_", " "))


def _of(records: Sequence[Record], key: str) -> list[Series | None]:
    """A curve per run, under the part of its name that runs do not share."""
    paths = [os.path.abspath(record.name) for record in records]
    above = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, above) for path in paths]
    return [_series(record, key, names[number], number) for number, record in enumerate(records)]


def _series(record: Record, key: str, name: str, colour: int) -> Series | None:
    lines = record.evaluations if key.startswith("eval_") else record.steps
    if key not in lines:
        return None
    return Series(name, lines["step"], lines[key], colour, points=lines is record.evaluations)


def step_time(record: Record) -> Chart | None:
    """The parts of a step over the steps, in milliseconds, without the first line, which is warm-up."""
    series = [
        Series(phase_name(phase), record.steps["step"][1:], 1000 * record.steps[f"{phase}_s"][1:], number)
        for number, phase in enumerate(PHASES)
        if f"{phase}_s" in record.steps
    ]
    return Chart("Where the step time went", "step", "ms per step", series, stacked=True) if series else None


def phase_name(phase: str) -> str:
    """A phase of the step in words."""
    return PHASE_NAMES.get(phase, phase)


def gpu_usage(record: Record) -> list[Chart]:
    """Utilization, memory and power of the GPU of each rank, over the steps."""
    keys = {
        "gpu_util_percent": ("GPU utilization", "%"),
        "gpu_memory_gib": ("GPU memory in use", "GiB"),
        "gpu_power_w": ("GPU power", "W"),
    }
    by_rank = {int(rank): record.gpus.of("rank", rank) for rank in np.unique(record.gpus["rank"]) if rank >= 0}
    if not by_rank:  # only rank 0's, in metrics.jsonl
        by_rank = {0: record.steps}
    charts = []
    for key, (title, unit) in keys.items():
        series = [
            Series(f"rank {rank}", lines["step"], lines[key], number)
            for number, (rank, lines) in enumerate(by_rank.items())
            if key in lines
        ]
        charts.append(Chart(title, "step", unit, series))
    return [chart for chart in charts if chart.series]
