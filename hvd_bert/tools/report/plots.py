"""The report's plots, and the style of all plots. Importing this module makes matplotlib draw without a display."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hvd_bert.storage.reading import GIB
from hvd_bert.tools.report.comparison import Compared, ScalingTable

matplotlib.use("Agg")

# Palette of Okabe and Ito (2008), distinguishable with any color vision.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "savefig.dpi": 130,
    "text.parse_math": False,  # a name with dollar signs is no formula
}


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


MARKERS = ("s", "o", "^", "D", "v", "P", "X")
LINEAR_UP_TO = 8  # times the fewest devices; beyond that the axis is logarithmic


def scaling(table: ScalingTable) -> bytes:
    """Speed-up, efficiency, throughput and memory of a table against the number of devices."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 7.6), layout="constrained")
        axes = figure.subplots(2, 2)
        base = table.baseline.one.devices
        counts = table.device_counts
        _ideal(axes[0, 0], counts, 1 / base)
        _panel(axes[0, 0], table, "Speed-up", _speedup)
        _ideal(axes[0, 1], counts, 0)
        _panel(axes[0, 1], table, "Efficiency", lambda line: _speedup(line, base / line.group.one.devices))
        _panel(axes[1, 0], table, f"Throughput, {table.lines[0].group.one.unit}/s", _throughput)
        _panel(axes[1, 1], table, "Memory per rank, GiB", _memory)
        handles, names = axes[1, 0].get_legend_handles_labels()
        ideal, ideal_name = axes[0, 0].get_legend_handles_labels()
        handles, names = [*handles, ideal[0]], [*names, ideal_name[0]]
        figure.legend(handles, names, loc="outside upper center", ncols=min(len(names), 7), title=table.title)
        return png(figure)


def _speedup(line: Compared, scale: float = 1.0) -> tuple[float, float, float] | None:
    """The speed-up with its bar, times `scale`; without a range the point alone."""
    if line.speedup is None:
        return None
    return line.speedup * scale, (line.speedup_min or line.speedup) * scale, (line.speedup_max or line.speedup) * scale


def _throughput(line: Compared) -> tuple[float, float, float] | None:
    return None if line.reason else (line.group.windows_per_s, *line.group.spread())


def _memory(line: Compared) -> tuple[float, float, float] | None:
    if line.reason:
        return None
    values = [run.memory_bytes / GIB for run in line.group.runs if run.memory_bytes is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


def _ideal(axes: Axes, counts: Sequence[int], slope: float) -> None:
    """Draw the ideal: a speed-up of `slope` per device; for 0, an efficiency of 1."""
    xs = [counts[0] + (counts[-1] - counts[0]) * part / 200 for part in range(201)]
    values = [slope * x or 1.0 for x in xs]
    axes.plot(xs, values, color="0.55", linewidth=1.0, linestyle=(0, (1, 2)), label="ideal", zorder=1)


def _panel(
    axes: Axes, table: ScalingTable, title: str, measure: Callable[[Compared], tuple[float, float, float] | None]
) -> None:
    """One line per strategy, shifted a little so that none hides another, with bars from minimum to maximum."""
    labels = list(dict.fromkeys(line.group.label for line in table.lines))
    counts = table.device_counts
    linear = counts[-1] <= LINEAR_UP_TO * counts[0]
    axes.update_datalim([(counts[0], 0)])  # the margin above the highest value is part of the whole height
    for number, label in enumerate(labels):
        shift = (number - (len(labels) - 1) / 2) * (0.018 * (counts[-1] - counts[0]) if linear else 0.05)
        lines = [line for line in table.lines if line.group.label == label]
        found = [(line.group.one.devices, figures) for line in lines if (figures := measure(line))]
        points = [(devices + shift if linear else devices * 2**shift, *values) for devices, values in found]
        if not points:
            continue
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 6, "linewidth": 1.6, "capsize": 3}
        xs, values, minimum, maximum = zip(*points, strict=True)
        below = [value - low for value, low in zip(values, minimum, strict=True)]
        above = [high - value for value, high in zip(values, maximum, strict=True)]
        axes.errorbar(xs, values, yerr=[below, above], label=label, zorder=2, **style)
    axes.set_title(title, loc="left")
    axes.set_xlabel("ranks" if all(line.group.one.devices == line.group.one.ranks for line in table.lines) else "GPUs")
    margin = 0.08 * (counts[-1] - counts[0])
    if not linear:
        axes.set_xscale("log", base=2)
    axes.set_xlim(*((counts[0] - margin, counts[-1] + margin) if linear else (counts[0] / 1.3, counts[-1] * 1.3)))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
