"""Test whether two models differ on the same questions: the paired bootstrap and McNemar's test."""

from __future__ import annotations

from math import exp, fsum, lgamma, log

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000


def interval(differences: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of `differences` [questions] in percent, by the percentile bootstrap.

    Rounded as printed, so that the verdict agrees with the printed interval. Swapping the models negates the interval,
    unless they tie.
    """
    count, sign = len(differences), -1 if differences.sum() < 0 else 1
    # The counts of values in a resample follow the multinomial distribution; drawing them is faster than questions.
    values, times = np.unique(np.round(sign * differences, 9), return_counts=True)
    means = np.random.default_rng(0).multinomial(count, times / count, RESAMPLES) @ values / count
    low, high = sorted(np.round(sign * np.quantile(means, (0.025, 0.975)), 2) + 0.0)  # + 0.0: no -0.0
    return float(low), float(high)


def verdict(low: float, high: float) -> str:
    """The verdict in words, from the interval of A - B."""
    return "no clear difference" if low <= 0 <= high else "A is better" if low > 0 else "B is better"


def mcnemar(only_first: int, only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test, from the numbers of questions that only one model answers right.

    Under the null hypothesis, each of these questions is answered by either model with probability 1/2.
    """
    count = only_first + only_second
    log_all = lgamma(count + 1) - count * log(2)
    tail = (exp(log_all - lgamma(k + 1) - lgamma(count - k + 1)) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * fsum(tail))
