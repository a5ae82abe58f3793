"""Plot speed-up, efficiency, throughput and memory against the number of devices."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hvd_bert.storage.reading import GIB
from hvd_bert.tools.rendering.figures import COLOURS, STYLE, saved
from hvd_bert.tools.report.comparison import Compared, ScalingTable
from hvd_bert.tools.report.tables import doubts

IDEAL = "0.45"
MARKERS = ("s", "o", "^", "D", "v", "P", "X")
LINEAR_UP_TO = 8  # for larger ratios of most to fewest devices, the horizontal axis is logarithmic
WIDTH, HEIGHT = 3.4, 2.1  # inches: a column of a two-column paper
LONG_NAME = 16  # characters: if any name is longer, all names go into a legend
NOTE_WIDTH = 78  # characters per line of the note on caveats
GAP = 0.095  # minimum distance between two names, as a share of the axis' height


Values = tuple[float, float, float]  # a figure, and the lower and upper end of its error bar
Measure = Callable[[Compared], Values | None]


def _speedup(line: Compared, scale: float = 1.0) -> Values:
    """Return the speed-up and its range, times `scale`. Without a range, the error bar has no length."""
    speedup = line.speedup or 0.0
    low, high = line.range or (speedup, speedup)
    return speedup * scale, low * scale, high * scale


def _memory(line: Compared) -> Values | None:
    values = [run.memory_bytes / GIB for run in line.group.runs if run.memory_bytes is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


# Panel -> function that returns a row's values, and a title with fields for the baseline and the unit.
MEASURES: dict[str, tuple[Measure, str]] = {
    "speedup": (_speedup, "Speed-up over {base}"),
    "efficiency": (
        lambda line: _speedup(line, (line.efficiency or 0) / (line.speedup or 1)),
        "Efficiency relative to {base}",
    ),
    "throughput": (lambda line: (line.group.windows_per_s, *line.group.spread), "Throughput, {unit}/s"),
    "memory": (_memory, "Memory per rank, GiB"),
}


def panel(table: ScalingTable, name: str, formats: Sequence[str]) -> dict[str, bytes]:
    """Plot the panel `name` of MEASURES against the number of devices. Returns format -> content of the file."""
    measure, title = MEASURES[name]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        axes.set_title(
            title.format(base=table.baseline.name, unit=table.baseline.first.unit), size="medium", loc="left"
        )
        ends = _lines(axes, table, measure)
        _axes(axes, table)
        if name in ("speedup", "efficiency"):
            ends.append(_ideal(axes, table, name))
        low, high = axes.get_ylim()  # the axis starts at 0 unless all values are close together
        axes.set_ylim(0 if low < high / 2 else low, high)
        found = [] if name == "memory" else doubts(table, table.measured)
        note = textwrap.fill(f"Uncertain: {', '.join(found)}", NOTE_WIDTH) if found else ""
        if any(len(name) > LONG_NAME for *_, name, _ in ends):
            figure.set_figheight(HEIGHT + GAP * HEIGHT * len(ends))
            figure.legend(loc="outside lower left", frameon=False, title=note, title_fontsize=6, alignment="left")
        else:
            _name(axes, ends)
            figure.supxlabel(note, x=0.01, ha="left", size=6, color=IDEAL)
        return {form: saved(figure, form) for form in formats}


End = tuple[float, float, str, str]  # the last point of a line: x, y, name and colour


def _lines(axes: Axes, table: ScalingTable, measure: Measure) -> list[End]:
    """Draw a line with error bars per strategy, each shifted a little so that it hides no other.

    Returns the ends of the lines.
    """
    labels = list(dict.fromkeys(line.group.label for line in table.lines))
    counts, linear, ends = table.device_counts, _is_linear(table), []
    for number, label in enumerate(labels):
        shift = (number - (len(labels) - 1) / 2) * (0.008 * (counts[-1] - counts[0]) if linear else 0.03)
        lines = [line for line in table.measured if line.group.label == label]
        found = [(line.group.first.devices, *figures) for line in lines if (figures := measure(line))]
        if not found:
            continue
        devices, values, low, high = np.array(found, dtype=float).T
        xs = devices + shift if linear else devices * 2**shift
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        style: Any = {"color": colour, "marker": marker, "capsize": 2, "elinewidth": 0.8, "label": label}
        axes.errorbar(xs, values, yerr=[values - low, high - values], zorder=2, **style)
        ends.append((xs[-1], values[-1], label, colour))
    return ends


def _is_linear(table: ScalingTable) -> bool:
    return table.device_counts[-1] <= LINEAR_UP_TO * table.device_counts[0]


def _axes(axes: Axes, table: ScalingTable) -> None:
    """Set up the axes: a tick for each number of devices, and few ticks on the vertical axis."""
    counts = table.device_counts
    axes.set_xlabel(
        "ranks"
        if all(line.group.first.devices == line.group.first.results.world_size for line in table.lines)
        else "GPUs"
    )
    margin = 0.06 * (counts[-1] - counts[0])
    if not _is_linear(table):
        axes.set_xscale("log", base=2)
    limits = (counts[0] - margin, counts[-1] + margin) if _is_linear(table) else (counts[0] / 1.2, counts[-1] * 1.2)
    axes.set_xlim(*limits)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.locator_params(axis="y", nbins=5)


def _ideal(axes: Axes, table: ScalingTable, name: str) -> End:
    """Draw the ideal line: a speed-up proportional to the number of devices, or an efficiency of 1."""
    counts = table.device_counts
    xs = [counts[0] + (counts[-1] - counts[0]) * part / 200 for part in range(201)]
    values = [x / table.baseline.first.devices if name == "speedup" else 1.0 for x in xs]
    axes.plot(xs, values, color=IDEAL, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1, label="ideal")
    return counts[-1], values[-1], "ideal", IDEAL


def _name(axes: Axes, ends: Sequence[End]) -> None:
    """Write each line's name on the right, without overlaps. Dotted lines lead from the ends to the right edge."""
    low, high = axes.get_ylim()
    right = axes.get_xlim()[1]
    ends = sorted(ends, key=lambda end: end[1])
    heights = spread([(value - low) / (high - low) for _, value, *_ in ends])
    for height, (x, value, name, colour) in zip(heights, ends, strict=True):
        axes.plot([x, right], [value, value], color=colour, linewidth=0.5, linestyle=":", zorder=0)
        axes.annotate(name, (1.02, height), xycoords="axes fraction", va="center", color=colour, annotation_clip=False)


def spread(heights: Sequence[float], gap: float = GAP) -> list[float]:
    """Move increasing heights as little as possible, so that they are at least `gap` apart."""
    clusters: list[list[float]] = []  # overlapping heights, each minus the gaps below it
    for number, height in enumerate(heights):
        clusters.append([height - gap * number])
        while len(clusters) > 1 and statistics.fmean(clusters[-2]) > statistics.fmean(clusters[-1]):
            last = clusters.pop()
            clusters[-1] += last
    apart = [statistics.fmean(cluster) for cluster in clusters for _ in cluster]
    return [height + gap * number for number, height in enumerate(apart)]
