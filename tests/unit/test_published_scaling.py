"""The projection's cost per weight, and the model's error against published figures."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import published_figures
import pytest

from hvd_bert.tools.report import projection
from hvd_bert.tools.report.comparability import STRONG, WEAK
from hvd_bert.tools.report.projection import Link, Network, Step, project

FAST = Network(Link(1e18, 0.0))


def test_the_cost_per_weight_starts_with_the_second_device():
    step = Step(1.0, 0.1, 100e6, overhead_s=0.2)
    for kind in (WEAK, STRONG):
        one, four = (project(step, devices, kind, FAST) for devices in (1, 4))
        bare = project(replace(step, overhead_s=0.0), 4, kind, FAST)
        assert (one.step_s, four.step_s - bare.step_s) == pytest.approx((1.1, 0.2))
        assert four.exposed_s == bare.exposed_s  # it is no communication


def test_published_series_are_off_by_less_than_3_points():
    model, bound = (fmean(published_figures.errors(cost)) for cost in (projection.NS_PER_WEIGHT, 0.0))
    assert model < 3 < bound
