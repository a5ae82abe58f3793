"""The page's plot: time per step."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hvd_bert.monitoring.timeline_rows import NONE, Array
from hvd_bert.tools.rendering.style import COLOURS, STYLE, png
from hvd_bert.tools.timeline.steps import StepTable

MAX_POINTS = 400  # along the axis; more steps are averaged


def steps(table: StepTable) -> bytes:
    """Time, exposed communication and wait for the last rank of each step."""
    table, took_us = table.timed()
    took = took_us * 1e-3
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots()
        _curve(axes, table.number, took, "step", COLOURS[0])
        _curve(axes, table.number, table.exposed_max * 1e-3, "exposed communication (at most)", COLOURS[1])
        waiting = np.where(table.last_rank != NONE, table.lag, table.wait) * 1e-3
        _curve(axes, table.number, waiting, "waiting for the last rank", COLOURS[2])
        axes.set_ylim(0, 1.15 * float(np.quantile(took, 0.98)))
        axes.set_xlabel("step (the first is left out)")
        axes.set_ylabel("ms")
        figure.legend(loc="outside upper center", ncols=3)
        return png(figure)


def _curve(axes: Axes, number: Array, values: Array, label: str, colour: str) -> None:
    width = -(-len(values) // MAX_POINTS)
    starts = np.arange(0, len(values), width)
    means = np.add.reduceat(values, starts) / np.diff(starts, append=len(values))
    axes.plot(number[starts], means, color=colour, label=label, linewidth=1.3)
