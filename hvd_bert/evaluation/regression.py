"""Metrics of a regression: those that run_glue uses for STS-B."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def scores(predicted: Values, labels: Values) -> dict[str, float]:
    """Pearson's and Spearman's correlation, which are 0 if all labels or all predictions are equal, and the mean
    squared error."""
    return {
        "pearson": _correlation(predicted, labels),
        "spearmanr": _correlation(_ranks(predicted), _ranks(labels)),
        "mse": float(np.mean((predicted - labels) ** 2)),
        "total": float(len(labels)),
    }


def _correlation(one: Values, other: Values) -> float:
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Values) -> Values:
    """The rank of each value; equal values share the mean of their ranks."""
    _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[number]
