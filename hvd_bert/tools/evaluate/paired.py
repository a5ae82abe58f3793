"""Test whether two models differ on the same questions: the paired bootstrap and McNemar's test."""

from __future__ import annotations

from math import exp, fsum, lgamma, log

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000


def interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Compute the 95 % interval of the mean of `differences`, in percent, by the percentile bootstrap.

    `differences`: score of A minus score of B, for each question. The interval is rounded as printed, so that the
    verdict agrees with it. Swapping the models negates the interval, unless their mean scores are equal.
    """
    count, sign = len(differences), -1 if differences.sum() < 0 else 1
    # Draw how often each distinct value occurs (multinomial distribution), which is faster than drawing questions.
    values, times = np.unique(np.round(sign * differences, 9), return_counts=True)
    means = np.random.default_rng(0).multinomial(count, times / count, RESAMPLES) @ values / count
    low, high = sorted(np.round(sign * np.quantile(means, (0.025, 0.975)), 2) + 0.0)  # + 0.0 turns -0.0 into 0.0
    return float(low), float(high)


def verdict(low: float, high: float) -> str:
    """Return the verdict in words. `low`, `high`: the interval of A - B."""
    return "no clear difference" if low <= 0 <= high else "A is better" if low > 0 else "B is better"


def mcnemar(only_first: int, only_second: int) -> float:
    """Compute the two-sided p-value of McNemar's exact test.

    `only_first`, `only_second`: number of questions that only the first or only the second model answers exactly. Under
    the null hypothesis, each of these questions is equally likely to count for either model.
    """
    count = only_first + only_second
    log_all = lgamma(count + 1) - count * log(2)
    tail = (exp(log_all - lgamma(k + 1) - lgamma(count - k + 1)) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * fsum(tail))
