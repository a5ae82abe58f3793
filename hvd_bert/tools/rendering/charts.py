"""Prepare the curves of the HTML page. The page contains their data; charts.js draws them with plotly.js."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from hvd_bert.errors import visible

MAX_POINTS = 1000  # per curve
MAX_POINTS_OF_ALL = 20_000  # per chart, so that a page of 50 runs opens quickly
MIN_POINTS = 100


@dataclass(frozen=True, eq=False)
class Series:
    """A curve."""

    name: str
    x: ArrayLike
    y: ArrayLike  # NaN: no value
    colour: int = 0  # index in the palette: a run has the same colour in all charts
    points: bool = False  # whether each point is marked, for curves with few points
    band: Sequence[NDArray[np.float64]] = ()  # lower and upper edge of an area around the curve


@dataclass(frozen=True)
class Chart:
    """A chart of one or more curves."""

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    stacked: bool = False  # whether curves are stacked areas, which add up to a whole
    noisy: bool = False  # whether the page adds a smoothed curve to each curve

    def data(self) -> Markup:
        """Return the chart as JSON for charts.js, escaped for a script element."""
        limit = max(MIN_POINTS, min(MAX_POINTS, MAX_POINTS_OF_ALL // max(1, len(self.series))))
        curves = [_curve(series, limit) for series in self.series]
        content = {"x": self.x_title, "stacked": self.stacked, "noisy": self.noisy, "curves": curves}
        # "</script>" in a name must not end the element.
        return Markup(json.dumps(content, allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026"))

    @property
    def rows(self) -> list[list[str]]:
        """Rows of a table that summarizes the curves, for screen readers. The header is in page.html."""
        rows = []
        for series in self.series:
            x, y = finite(series)
            if len(y):
                figures = (x[0], x[-1], y[0], y.min(), y.max(), y[-1])
                rows.append([series.name, f"{len(y):,}", *(f"{figure:.5g}" for figure in figures)])
        return rows


def finite(series: Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return x and y of a curve's points, without points that have no value."""
    x, y = np.asarray(series.x, dtype=np.float64), np.asarray(series.y, dtype=np.float64)
    known = np.isfinite(x) & np.isfinite(y)
    return x[known], y[known]


def _curve(series: Series, limit: int) -> dict[str, Any]:
    x, y = downsample(*finite(series), limit)
    steps = np.asarray(series.x, dtype=np.float64)
    return {
        "name": visible(series.name),
        "colour": series.colour,
        "points": series.points,
        "x": _short(x),
        "y": _short(y),
        "band": [_short(np.interp(x, steps, edge)) for edge in series.band],
    }


def _short(values: NDArray[np.float64]) -> list[float | int]:
    return [
        int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}") for value in values.tolist()
    ]


def downsample(
    x: NDArray[np.float64], y: NDArray[np.float64], limit: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Choose at most `limit` points: the first, the last, and the minimum and maximum of each equal-sized section."""
    if len(y) <= limit:
        return x, y
    edges = np.linspace(0, len(y), (limit - 2) // 2 + 1).astype(int)
    sections = [(start, y[start:end]) for start, end in itertools.pairwise(edges)]
    lowest = [start + section.argmin() for start, section in sections]
    extremes = lowest + [start + section.argmax() for start, section in sections]
    chosen = np.unique([0, *extremes, len(y) - 1])
    return x[chosen], y[chosen]


def scripts() -> list[Markup]:
    """Read the JavaScript of a page with charts: plotly.js and charts.js."""
    plotly = resources.files("plotly").joinpath("package_data/plotly.min.js")
    own = resources.files("hvd_bert.tools.rendering").joinpath("charts.js")
    return [Markup(file.read_text(encoding="utf-8")) for file in (plotly, own)]
