"""Mean, standard deviation and confidence interval over seeds."""

from __future__ import annotations

import numpy as np
import pytest
from made_runs import make_run
from tables import each

from hvd_bert.tools.report.comparison import grouped
from hvd_bert.tools.report.runs_page import interval, repeats
from hvd_bert.tools.runs import reading


@each("count", [2, 5, 11, 31, 32, 100, 1000])
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
    assert [row[:2] for row in grid.rows] == [
        ["none, 1 rank", name] for name in ("exact_match", "f1", "last loss", "windows/s")
    ]
    assert grid.rows[1][2:] == ["3", "71", "1", "68.52 to 73.48", "70", "72"]


def test_one_seed_is_no_repeat(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name)
    assert repeats(grouped([reading.read(folder) for folder in reading.find([tmp_path])])) is None
