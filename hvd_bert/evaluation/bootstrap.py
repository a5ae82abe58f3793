"""How certain the difference between two models' scores on the same questions is: the paired bootstrap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES, SEED = 10_000, 0
CONFIDENCE = 0.95
_AT_ONCE = 500  # resamples, to bound the memory


@dataclass(frozen=True)
class Difference:
    """A mean difference with its interval."""

    mean: float
    low: float
    high: float


def paired_difference(
    first: NDArray[np.float64], second: NDArray[np.float64], resamples: int = RESAMPLES
) -> Difference:
    """The mean of `first - second`, with the percentile interval of its bootstrap over the questions.

    A resample draws as many questions as there are, with replacement. The number of times that it draws each distinct
    difference follows a multinomial distribution, from which it is drawn directly: most questions have the same one.
    """
    differences = np.asarray(first) - np.asarray(second)
    values, counts = np.unique(differences, return_counts=True)
    total = len(differences)
    random = np.random.default_rng(SEED)
    sizes = [min(_AT_ONCE, resamples - first) for first in range(0, resamples, _AT_ONCE)]
    sums = [random.multinomial(total, counts / total, size) @ values for size in sizes]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(sums) / total, (tail, 1 - tail))
    return Difference(float(differences.mean()), float(low), float(high))
