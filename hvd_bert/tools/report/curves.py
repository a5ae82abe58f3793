"""Make charts of curves over the steps, for one run or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hvd_bert.monitoring import PHASES
from hvd_bert.tools.rendering import SHORT, time_unit
from hvd_bert.tools.rendering.charts import Chart, Series, finite
from hvd_bert.tools.rendering.figures import COLOURS
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.runs.finding import short_names
from hvd_bert.tools.runs.record import Record

GPU_FIGURES = (
    ("gpu_util_percent", "GPU utilization", "%"),
    ("gpu_memory_gib", "GPU memory in use", "GiB"),
    ("gpu_power_w", "GPU power", "W"),
)
Sets = Mapping[str, tuple[int, Sequence[Record]]]  # name of a curve -> index in the palette, and the curve's runs


def run_charts(record: Record) -> list[Chart]:
    """Make the charts of a run: loss, scores, learning rate, gradient norm and throughput, as far as recorded."""
    losses = [_series(record, "loss", "training", 0), _series(record, "eval_loss", "validation", 1)]
    names = {name: score_name(name) + record.curve_rules for name in record.score_names}
    scores = [_series(record, f"eval_{name}", title, i) for i, (name, title) in enumerate(names.items())]
    charts = [_chart("Loss", "loss", losses)]
    if len(record.evaluations) > 1:  # a single evaluation does not make a curve
        charts.append(_chart("Scores", _score_unit([record]), scores))
    return [*charts, *_training_charts({record.name: (0, [record])})]


def of_runs(records: Sequence[Record], groups: Sequence[Group]) -> list[Chart]:
    """Make the charts of several runs. A group has one curve, with a band for the range of its repeats.

    A run has its own curve if it is in no group, or if another group has the same name as its group.
    """
    sets = _named(records, groups)
    charts = [_chart("Training loss", "loss", _curves(sets, "loss"))]
    if any(len(record.evaluations) > 1 for record in records):
        charts.append(_chart("Validation loss", "loss", _curves(sets, "eval_loss")))
        names = dict.fromkeys((name, record.curve_rules) for record in records for name in record.score_names)
        for name, rules in names:
            scored = [record for record in records if name in record.score_names]
            alike = {curve: runs for curve, runs in sets.items() if runs[1][0].curve_rules == rules}
            charts.append(_chart(score_name(name) + rules, _score_unit(scored), _curves(alike, f"eval_{name}")))
    return [*charts, *_training_charts(sets)]


def _training_charts(sets: Sets) -> list[Chart]:
    units = dict.fromkeys(f"{record.unit}/s" for _, records in sets.values() for record in records if len(record.steps))
    return [
        _chart("Learning rate", "learning rate", _curves(sets, "learning_rate"), noisy=False),
        _chart("Gradient norm before clipping", "norm", _curves(sets, "grad_norm")),
        _chart("Throughput", " or ".join(units), _curves(sets, "windows_per_s")),
    ]


def _chart(title: str, unit: str, series: Iterable[Series], noisy: bool = True, stacked: bool = False) -> Chart:
    """Make a chart over the steps. Omits curves that have no values."""
    return Chart(title, "step", unit, [curve for curve in series if len(finite(curve)[0])], stacked, noisy)


def _score_unit(records: Sequence[Record]) -> str:
    """Return the unit for a chart of scores: EM and F1 are in percent."""
    return "percent" if any("exact_match" in record.score_names for record in records) else "score"


def score_name(name: str) -> str:
    """Return a score's name for tables and charts."""
    return SHORT.get(name, name.replace("_", " "))


def group_names(groups: Sequence[Group]) -> list[str]:
    """Name the groups. Adds the global batch to names that several groups share."""
    names = [group.name for group in groups]
    batches = [f"{name}, batch {group.first.results.global_batch}" for name, group in zip(names, groups, strict=True)]
    return [name if names.count(name) == 1 else batch for name, batch in zip(names, batches, strict=True)]


def _named(records: Sequence[Record], groups: Sequence[Group]) -> Sets:
    """Assign the runs to named curves: one per group, and one for each run of groups with the same name.

    The index in the palette gives each strategy a color, and each number of devices a dash pattern.
    """
    labels = list(dict.fromkeys(group.label for group in groups))
    counts = sorted({group.first.devices for group in groups})
    sets: dict[str, tuple[int, Sequence[Record]]] = {}
    names = group_names(groups)
    for name, group in zip(names, groups, strict=True):
        if names.count(name) == 1:
            colour = labels.index(group.label) % len(COLOURS) + len(COLOURS) * counts.index(group.first.devices)
            while any(colour == other for other, _ in sets.values()):  # taken by a group with another batch
                colour += len(COLOURS)
            sets[name] = colour, group.runs
    named = {run for _, runs in sets.values() for run in runs}
    others = [record for record in records if record not in named]
    short = short_names([record.name for record in others])
    own = zip(short, others, strict=True)
    return sets | {name: (len(sets) + number, [record]) for number, (name, record) in enumerate(own)}


def _curves(sets: Sets, key: str) -> list[Series]:
    return [_median([_series(record, key, name, colour) for record in runs]) for name, (colour, runs) in sets.items()]


def _median(repeats: Sequence[Series]) -> Series:
    """Combine repeats into a curve of their median, with their range, at the steps that all repeats have."""
    known = [series for series in repeats if len(finite(series)[0])]
    if len(known) < 2:
        return [*known, *repeats][0]
    points = [dict(zip(*(axis.tolist() for axis in finite(series)), strict=True)) for series in known]
    steps = sorted(set.intersection(*map(set, points)))
    values = np.array([[curve[step] for step in steps] for curve in points])
    low, middle, high = values.min(axis=0), np.median(values, axis=0), values.max(axis=0)
    return replace(known[0], x=steps, y=middle, band=(low, high))


def _series(record: Record, key: str, name: str, colour: int) -> Series:
    lines = record.evaluations if key.startswith("eval_") else record.steps
    return Series(name, lines["step"], lines[key], colour, points=lines is record.evaluations)


def step_time(record: Record) -> Chart:
    """Chart step time by phase. Omits the first log line, which is warm-up."""
    steps = record.steps
    unit, scale = time_unit(float(np.nanmax([0, *steps["step_s"][1:]])))
    series = [
        Series(name, steps["step"][1:], scale * steps[f"{phase}_s"][1:], number)
        for number, (phase, name) in enumerate(PHASES.items())
    ]
    return _chart("Step time by phase", f"{unit} per step", series, noisy=False, stacked=True)


def gpu_usage(record: Record) -> list[Chart]:
    """Chart GPU utilization, memory and power per rank over the steps."""
    by_rank = {int(rank): record.gpus.where("rank", rank) for rank in np.unique(record.gpus["rank"]) if rank >= 0}
    if not by_rank:  # use metrics.jsonl, which has rank 0's figures
        by_rank = {0: record.steps}
    charts = []
    for key, title, unit in GPU_FIGURES:
        lines = enumerate(by_rank.items())
        series = [Series(f"rank {rank}", rows["step"], rows[key], number) for number, (rank, rows) in lines]
        charts.append(_chart(title, unit, series))
    return charts
