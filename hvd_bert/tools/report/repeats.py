"""Repeats of a run with other seeds: mean, standard deviation and confidence interval of the scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hvd_bert.rendering.page import DASH, Grid
from hvd_bert.tools.report.comparability import Group

# 97.5 % quantiles of Student's t-distribution for 1, 2, ... degrees of freedom.
T_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of at least two values, by the t-distribution."""
    freedom = len(values) - 1
    mean, half = statistics.fmean(values), _t_quantile(freedom) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def _t_quantile(freedom: int) -> float:
    """The 97.5 % quantile; beyond the table by an expansion around the normal distribution (error below 1e-4)."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def repeats(groups: Sequence[Group]) -> Grid | None:
    """Scores, loss and throughput of all groups with several seeds; None if there is none."""
    rows = [row for group in groups if len({run.seed for run in group.runs}) > 1 for row in _rows(group)]
    head = ["runs", "figure", "n", "mean", "standard deviation", "95 % interval of the mean", "lowest", "highest"]
    return Grid(head, rows, words=2) if rows else None


def _rows(group: Group) -> list[list[str]]:
    figures: dict[str, list[float | None]] = {
        name: [run.scores.get(name) for run in group.runs] for name in group.one.scores
    }
    figures["last loss"] = [run.last_loss for run in group.runs]
    figures[f"{group.one.unit}/s"] = [run.windows_per_s for run in group.runs]
    rows = []
    for name, values in figures.items():
        known = [value for value in values if value is not None]
        if len(known) > 1:
            low, high = interval(known)
            numbers = [statistics.fmean(known), statistics.stdev(known)]
            cells = [f"{number:.4g}" for number in numbers] + [f"{low:.4g} to {high:.4g}"]
            rows.append([group.name, name, str(len(known)), *cells, f"{min(known):.4g}", f"{max(known):.4g}"])
        elif known:
            rows.append([group.name, name, "1", f"{known[0]:.4g}", *[DASH] * 4])
    return rows
