"""Repeats: the confidence interval over seeds, and the range of a speed-up by a bootstrap of both sides."""

from __future__ import annotations

import numpy as np
import pytest
from made_runs import make_run

from hvd_bert.tools.report import comparison
from hvd_bert.tools.report.comparability import Group
from hvd_bert.tools.report.comparison import grouped
from hvd_bert.tools.report.runs_page import interval, repeats
from hvd_bert.tools.runs import finding, record


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
    runs = [record.read(folder) for folder in finding.find([tmp_path])]
    grid = repeats(grouped(runs))
    assert grid is not None
    assert [row[:2] for row in grid.rows] == [["none, 1 rank", name] for name in ("EM", "F1", "last loss", "windows/s")]
    assert grid.rows[1][2:] == ["3", "71", "1", "68.52 to 73.48", "70", "72"]


def test_range_of_a_speedup_is_within_the_extremes_of_both_sides(tmp_path):
    groups = {}
    for name, slowest in (("base", 8), ("faster", 18)):
        runs = [make_run(tmp_path / f"{name}-{more}", windows_per_s=slowest + more) for more in range(5)]
        groups[name] = Group(tuple(map(record.read, runs)), name)
    minimum, maximum = comparison.speedup_range(groups["base"], groups["faster"])
    # All extremes at once are less likely than 2.5 %: 0.058 squared.
    assert 18 / 12 < minimum < 1.7 and 2.3 < maximum < 22 / 8
