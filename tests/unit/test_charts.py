"""Charts: downsampling of long curves, and the data that a page embeds."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvd_bert.tools.rendering.charts import MAX_POINTS, Chart, Series, downsample

Values = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300)


@given(Values, st.integers(6, 100))
def test_downsampling_keeps_ends_and_extremes(values, limit):
    y = np.array(values)
    x, chosen = downsample(np.arange(len(y), dtype=float), y, limit)
    assert len(chosen) <= max(limit, 1)
    assert (chosen == y[x.astype(int)]).all() and (np.diff(x) > 0).all()
    assert (chosen[0], chosen[-1], chosen.min(), chosen.max()) == (y[0], y[-1], y.min(), y.max())


def test_a_spike_of_one_step_is_kept():
    y = np.zeros(10_000)
    y[4321] = 7.0
    (curve,) = json.loads(Chart("loss", "step", "loss", [Series("run", np.arange(10_000), y)]).data())["curves"]
    assert len(curve["y"]) <= MAX_POINTS
    assert curve["x"][curve["y"].index(7)] == 4321


def test_missing_values_are_left_out_of_curve_and_summary():
    chart = Chart("norm", "step", "norm", [Series("run", [1, 2, 3, 4], [math.nan, 5.0, 2.0, math.nan])])
    (curve,) = json.loads(chart.data())["curves"]
    assert (curve["x"], curve["y"]) == ([2, 3], [5, 2])
    assert chart.rows == [["run", "2", "2", "3", "5", "2", "5", "2"]]
    assert Chart("norm", "step", "norm", [Series("run", [1], [math.nan])]).rows == []
