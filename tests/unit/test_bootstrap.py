"""The paired bootstrap: a case computed by hand, and properties of any scores."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hvd_bert.tools.evaluate.slices import Difference, paired_difference

PERCENT = st.floats(0, 100)
PAIRS = st.integers(1, 30).flatmap(
    lambda n: st.tuples(arrays(float, n, elements=PERCENT), arrays(float, n, elements=PERCENT))
)


def of(differences: list[float]) -> Difference:
    return paired_difference(np.array(differences), np.zeros(len(differences)))


def test_interval_of_all_resamples():
    """Of the 4^4 resamples of 4 questions, 2.5 % of the means are at most `low`, and 2.5 % at least `high`."""
    differences = [100.0, 0.0, 0.0, -100.0]
    means = np.array([np.mean(resample) for resample in itertools.product(differences, repeat=4)])
    low, high = np.quantile(means, (0.025, 0.975))
    assert (low, high) == (-75.0, 75.0)
    assert of(differences) == Difference(0.0, -75.0, 75.0)


quick = partial(paired_difference, resamples=1000)


@settings(deadline=None, max_examples=50)
@given(PAIRS)
def test_properties(pair):
    first, second = pair
    found = quick(first, second)
    differences = first - second
    slack = 1e-9
    assert found.mean == pytest.approx(differences.mean())
    assert differences.min() - slack <= found.low <= found.high <= differences.max() + slack
    assert found == quick(first, second), "the seed is fixed"
    order = np.argsort(second, kind="stable")[::-1]
    reordered = quick(first[order], second[order])
    assert (reordered.low, reordered.high) == (found.low, found.high)
    same = quick(first, first)
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    swapped = quick(second, first)
    assert swapped.mean == pytest.approx(-found.mean)
