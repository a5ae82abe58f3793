"""What the pages of one run and of several share: curves over the steps, and settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_bert.config.settings import FLAGS
from hvd_bert.monitoring import PHASES
from hvd_bert.tools.rendering import DASH, SHORT, shown, time_unit
from hvd_bert.tools.rendering.charts import Chart, Series, finite
from hvd_bert.tools.rendering.figures import COLOURS
from hvd_bert.tools.rendering.page import Grid
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.runs.record import Record, kept

Sets = Mapping[str, tuple[int, Sequence[Record]]]  # a curve's name -> its place in the palette, and its runs


def run_charts(record: Record) -> list[Chart]:
    """Loss, scores, learning rate, gradient norm and throughput of one run, as far as recorded."""
    losses = [_series(record, "loss", "training", 0), _series(record, "eval_loss", "validation", 1)]
    scores = [_series(record, f"eval_{name}", score_name(name), place) for place, name in enumerate(record.score_names)]
    charts = [_chart("Loss", "loss", losses)]
    if len(record.evaluations) > 1:  # one evaluation is no curve
        charts.append(_chart("Scores", _score_unit([record]), scores))
    return [chart for chart in [*charts, *_training_charts({record.name: (0, [record])})] if chart.series]


def of_runs(records: Sequence[Record], groups: Sequence[Group]) -> list[Chart]:
    """Charts of several runs: a curve per row of the tables, with a band over its repeats, or per run."""
    sets = _named(records, groups)
    charts = [_chart("Training loss", "loss", _curves(sets, "loss"))]
    if any(len(record.evaluations) > 1 for record in records):
        charts.append(_chart("Validation loss", "loss", _curves(sets, "eval_loss")))
        names = dict.fromkeys(name for record in records for name in record.score_names)
        for name in names:
            scored = [record for record in records if name in record.score_names]
            charts.append(_chart(score_name(name), _score_unit(scored), _curves(sets, f"eval_{name}")))
    return [chart for chart in [*charts, *_training_charts(sets)] if chart.series]


def _training_charts(sets: Sets) -> list[Chart]:
    units = dict.fromkeys(f"{record.unit}/s" for _, records in sets.values() for record in records if len(record.steps))
    return [
        _chart("Learning rate", "learning rate", _curves(sets, "learning_rate")),
        _chart("Gradient norm before clipping", "norm", _curves(sets, "grad_norm")),
        _chart("Throughput", " or ".join(units), _curves(sets, "windows_per_s")),
    ]


def _chart(title: str, unit: str, series: Iterable[Series | None]) -> Chart:
    return Chart(title, "step", unit, [found for found in series if found], noisy=title != "Learning rate")


def _score_unit(records: Sequence[Record]) -> str:
    """The unit of a chart of scores: of EM and F1 it is known."""
    return "percent" if any("exact_match" in record.score_names for record in records) else "score"


def score_name(name: str) -> str:
    """A score's name for tables and charts."""
    return SHORT.get(name, name.replace("_", " "))


def group_names(groups: Sequence[Group]) -> list[str]:
    """The names of the groups, with the global batch where two would have the same."""
    names = [group.name for group in groups]
    batches = [f"{name}, batch {group.one.global_batch}" for name, group in zip(names, groups, strict=True)]
    return [name if names.count(name) == 1 else batch for name, batch in zip(names, batches, strict=True)]


def _named(records: Sequence[Record], groups: Sequence[Group]) -> Sets:
    """The runs by row of the tables, where its name says what sets it apart; else a run under its part of the path.

    A strategy has its color in the plots, and a number of devices its dashes.
    """
    labels = list(dict.fromkeys(group.label for group in groups))
    counts = sorted({group.one.devices for group in groups})
    by_name = {record.name: record for record in records}
    sets: dict[str, tuple[int, Sequence[Record]]] = {}
    names = group_names(groups)
    for name, group in zip(names, groups, strict=True):
        if names.count(name) == 1:
            colour = labels.index(group.label) % len(COLOURS) + len(COLOURS) * counts.index(group.one.devices)
            while any(colour == other for other, _ in sets.values()):  # of another batch
                colour += len(COLOURS)
            sets[name] = colour, [by_name.pop(run.name) for run in group.runs]
    paths = {name: os.path.abspath(name) for name in by_name}
    above = os.path.commonpath([os.path.dirname(path) for path in paths.values()]) if paths else ""
    return sets | {
        os.path.relpath(path, above): (len(sets) + place, [by_name[name]])
        for place, (name, path) in enumerate(paths.items())
    }


def _curves(sets: Sets, key: str) -> list[Series | None]:
    return [_band(records, key, name, colour) for name, (colour, records) in sets.items()]


def _band(records: Sequence[Record], key: str, name: str, colour: int) -> Series | None:
    """The median of the repeats at the steps that all have, with their range."""
    found = [series for record in records if (series := _series(record, key, name, colour))]
    if len(found) < 2:
        return found[0] if found else None
    points = [dict(zip(*(part.tolist() for part in finite(series)), strict=True)) for series in found]
    steps = sorted(set.intersection(*map(set, points)))
    values = np.array([[own[step] for step in steps] for own in points])
    low, middle, high = values.min(axis=0), np.median(values, axis=0), values.max(axis=0)
    return Series(name, steps, middle, colour, found[0].points, (low, high)) if steps else None


def _series(record: Record, key: str, name: str, colour: int) -> Series | None:
    lines = record.evaluations if key.startswith("eval_") else record.steps
    if key not in lines:
        return None
    return Series(name, lines["step"], lines[key], colour, points=lines is record.evaluations)


def step_time(record: Record) -> Chart | None:
    """The parts of a step over the steps, without the first line, which is warm-up."""
    steps = record.steps
    unit, scale = time_unit(float(np.nanmax([0, *steps["step_s"][1:]])))
    series = [
        Series(name, steps["step"][1:], scale * steps[f"{phase}_s"][1:], number)
        for number, (phase, name) in enumerate(PHASES.items())
        if f"{phase}_s" in steps
    ]
    return Chart("Where the step time went", "step", f"{unit} per step", series, stacked=True) if series else None


def gpu_usage(record: Record) -> list[Chart]:
    """Utilization, memory and power of the GPU of each rank, over the steps."""
    keys = {
        "gpu_util_percent": ("GPU utilization", "%"),
        "gpu_memory_gib": ("GPU memory in use", "GiB"),
        "gpu_power_w": ("GPU power", "W"),
    }
    by_rank = {int(rank): record.gpus.where("rank", rank) for rank in np.unique(record.gpus["rank"]) if rank >= 0}
    if not by_rank:  # only rank 0's, in metrics.jsonl
        by_rank = {0: record.steps}
    charts = []
    for key, (title, unit) in keys.items():
        series = [
            Series(f"rank {rank}", lines["step"], lines[key], number)
            for number, (rank, lines) in enumerate(by_rank.items())
            if key in lines
        ]
        charts.append(Chart(title, "step", unit, series, noisy=True))
    return [chart for chart in charts if chart.series]


OUTPUT = ("output_dir", "overwrite_output_dir")  # differ between any two runs
# Of train_results.json: the world and the machine.
FACTS = ("world_size", "global_batch", "learning_rate", "train_steps", "hosts", "device_name", "threads_per_rank")


def changed(settings: Mapping[str, Any]) -> Grid:
    """The settings that differ from their defaults."""
    rows = []
    for name, value in settings.items():
        if _is_changed(name, value):
            flag = FLAGS.get(name)
            default = (flag.default_text if flag.default is None else shown(flag.default)) if flag else "unknown flag"
            rows.append([f"--{name}", shown(value), default or DASH])
    return Grid(["setting", "value", "default"], rows, words=3)


def unchanged(settings: Mapping[str, Any]) -> Grid:
    """The settings that have their defaults."""
    rows = [[f"--{name}", shown(value)] for name, value in settings.items() if not _is_changed(name, value)]
    return Grid(["setting", "value"], rows, words=2)


def _is_changed(name: str, value: Any) -> bool:
    return name not in FLAGS or value != FLAGS[name].default


def differences(records: Sequence[Record]) -> Grid:
    """What is not the same in all runs: a row or, if fewer, a column per run, which repeats share."""
    values = [_compared(record) for record in records]
    names = dict.fromkeys(name for compared in values for name in compared)
    differing = [name for name in names if len({compared.get(name, DASH) for compared in values}) > 1]
    for chosen in ([name for name in differing if name != "--seed"], differing):
        alike: dict[tuple[str, ...], list[str]] = {}
        for record, compared in zip(records, values, strict=True):
            alike.setdefault(tuple(compared.get(name, DASH) for name in chosen), []).append(record.name)
        if 1 < len(alike) < len(records):  # repeats share a row
            break
    runs = [run + (f" and {len(others)} more" if others else "") for run, *others in alike.values()]
    if len(chosen) > len(runs):
        rows = [[name, *cells] for name, cells in zip(chosen, zip(*alike, strict=True), strict=True)]
        return Grid(["what", *runs], rows, words=len(runs) + 1)
    rows = [[run, *cells] for run, cells in zip(runs, alike, strict=True)]
    return Grid(["run", *chosen], rows, words=len(chosen) + 1)


def _compared(record: Record) -> dict[str, str]:
    compared = {f"--{name}": shown(value) for name, value in record.settings.items() if name not in OUTPUT}
    compared |= {name.replace("_", " "): shown(record.facts[name]) for name in FACTS if name in record.facts}
    for key in ("versions", "work"):
        kind = kept(record.facts.get(key), dict[str, Any], {})
        compared |= {name: shown(value) for name, value in kind.items() if name not in compared}
    return compared
