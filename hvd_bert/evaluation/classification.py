"""Metrics of a classification, as fractions: those of scikit-learn that run_glue uses."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Classes = NDArray[np.int64]


def scores(predicted: Classes, labels: Classes, num_labels: int) -> dict[str, float]:
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
