"""Whether two models differ: the paired bootstrap and McNemar's test, against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_bert.tools.evaluate.paired import RESAMPLES, interval, mcnemar, verdict


def scores(model: int, shift: float = 0.0) -> np.ndarray:
    """F1 in percent of 400 questions, which differs between models on every fourth, by `shift` on average."""
    random = np.random.default_rng(7)
    common = random.choice([0.0, 40.0, 100 / 3, 100.0], 400)
    own = np.random.default_rng(model).choice([0.0, 50.0, 200 / 3, 100.0], 400) + shift
    return np.where(np.arange(400) % 4, common, own)


def test_interval_is_scipys():
    stats = pytest.importorskip("scipy.stats")
    first, second = scores(1, shift=12.0), scores(2)
    scipys = stats.bootstrap(
        (first, second),
        lambda a, b, axis: (a - b).mean(axis=axis),
        paired=True,
        method="percentile",
        n_resamples=RESAMPLES,
        batch=1000,
        rng=3,
    )
    found = interval(first - second)
    spread = scipys.standard_error
    assert found == pytest.approx(tuple(scipys.confidence_interval), abs=0.08 * spread)  # of the random numbers
    assert interval(first - second) == found


def test_swapped_models_have_the_negative_interval():
    low, high = interval(scores(1) - scores(2))
    assert interval(scores(2) - scores(1)) == (-high, -low) and low < high


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (scores(1), scores(1), "no clear difference"),  # a model and itself
        (scores(1), scores(2), "no clear difference"),
        (scores(1, shift=40.0), scores(2), "A is better"),
        (scores(1), scores(2, shift=40.0), "B is better"),
    ],
)
def test_verdict(first, second, found):
    assert verdict(*interval(first - second)) == found


@given(st.integers(0, 1200), st.integers(0, 1200))
def test_mcnemars_test_is_the_binomial_test(first, second):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == mcnemar(second, first) == pytest.approx(expected, rel=1e-9, abs=1e-250)
