"""Repeats: the confidence interval over seeds, and the range of a speed-up by a bootstrap of both sides."""

from __future__ import annotations

import numpy as np
import pytest
from made_runs import make_run

from hvd_bert.tools.report import comparison
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import grouped
from hvd_bert.tools.report.runs_page import interval, repeats
from hvd_bert.tools.runs import reading


@pytest.mark.parametrize("count", [2, 11, 31])
def test_interval_is_scipys(count):
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(count).normal(70, 2, count)
    expected = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert interval(values.tolist()) == pytest.approx(expected, abs=1e-3)


def test_repeats_of_runs(tmp_path):
    for seed, f1 in enumerate((70.0, 71.0, 72.0)):
        make_run(tmp_path / f"{seed}", seed=seed, scores=(60.0, f1))
    make_run(tmp_path / "one", "horovod", 2, scores=(1.0, 2.0))
    runs = [reading.read(folder) for folder in reading.find([tmp_path])]
    grid = repeats(grouped(runs))
    assert grid is not None
    assert [row[:2] for row in grid.rows] == [["none, 1 rank", name] for name in ("EM", "F1", "last loss", "windows/s")]
    assert grid.rows[1][2:] == ["3", "71", "1", "68.52 to 73.48", "70", "72"]


def test_range_of_a_speedup_includes_the_baselines_variance(tmp_path):
    def group(name: str, *speeds: float) -> Group:
        folders = [make_run(tmp_path / f"{name}-{i}", windows_per_s=speed) for i, speed in enumerate(speeds)]
        return Group(tuple(map(reading.read, folders)), name)

    steady, noisy = group("steady", 10, 10, 10, 10, 10), group("noisy", 8, 9, 10, 11, 12)
    faster = group("faster", 18, 19, 20, 21, 22)
    own, both = comparison.speedup_range(steady, faster), comparison.speedup_range(noisy, faster)
    assert own == pytest.approx((1.8, 2.2))
    assert both[0] < 1.7 and both[1] > 2.3
    # All extremes at once are less likely than 2.5 %: 0.058 squared.
    assert both[0] > 18 / 12 and both[1] < 22 / 8
    assert comparison.speedup_range(noisy, faster) == both
    assert comparison.speedup_range(group("one", 10), faster) == (None, None)
