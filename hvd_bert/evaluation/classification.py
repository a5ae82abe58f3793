"""Metrics of classifications and regressions: those that run_glue uses."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Classes = NDArray[np.int64]


def classification_scores(predicted: Classes, labels: Classes, num_labels: int) -> dict[str, float]:
    """Accuracy, F1 and Matthews correlation.

    F1 is that of class 1 if there are two classes, as in run_glue, and the mean over the classes otherwise.
    """
    confusion = np.zeros((num_labels, num_labels), dtype=np.int64)  # [label, prediction]
    np.add.at(confusion, (labels, predicted), 1)
    correct, of_label, of_prediction = np.diagonal(confusion), confusion.sum(1), confusion.sum(0)
    there = of_label + of_prediction
    f1 = np.divide(2 * correct, there, out=np.zeros(num_labels), where=there > 0)
    present = there > 0  # scikit-learn leaves out classes that neither labels nor predictions have
    return {
        "accuracy": float(correct.sum() / len(labels)),
        "f1": float(f1[1] if num_labels == 2 else f1[present].mean()),
        "matthews_correlation": _matthews(confusion),
        "total": float(len(labels)),
    }


def _matthews(confusion: NDArray[np.int64]) -> float:
    """Gorodkin 2004, for any number of classes; 0 if all labels or all predictions are the same."""
    of_label, of_prediction, total = confusion.sum(1), confusion.sum(0), int(confusion.sum())
    covariance = int(np.diagonal(confusion).sum()) * total - int(of_label @ of_prediction)
    variances = (total**2 - int(of_label @ of_label)) * (total**2 - int(of_prediction @ of_prediction))
    return covariance / math.sqrt(variances) if variances else 0.0


Values = NDArray[np.float64]


def regression_scores(predicted: Values, labels: Values) -> dict[str, float]:
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
