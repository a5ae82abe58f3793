"""The projection: times checked by hand, the error against published figures, and the report's page."""

from __future__ import annotations

import csv
from statistics import fmean

import published_figures
import pytest
from documented import undocumented
from made_runs import make_run
from PIL import Image
from tables import each

from hvd_bert.storage import written
from hvd_bert.tools.report import comparison, projection
from hvd_bert.tools.report.__main__ import main
from hvd_bert.tools.report.comparability import STRONG, WEAK
from hvd_bert.tools.report.projection import (
    Fusion,
    Link,
    Network,
    Step,
    allreduce_s,
    exposed_s,
    in_fp16,
    link_of,
    project,
)
from hvd_bert.tools.runs import reading

FAST = Network(Link(1e18, 0.0))
SLOW = Network(Link(1e9, 1e-5))


RING = 6 * (1e-5 + 0.025)  # 4 devices: 6 messages of a quarter of 100 MB, each 10 us and 25 ms
TWO_LEVELS = Network(Link(1e9, 1e-3), Link(1e10, 0.0), devices_per_node=4)


@each(
    ("size", "devices", "network", "expected"),
    [
        (100e6, 4, SLOW, RING),
        (100e6, 1, SLOW, 0),
        (1e9, 1024, Network(Link(1e9, 0.0)), 2 * 1023 / 1024),
        # Inside: 6 messages of 25 MB at 10 GB/s. Between two nodes: 2 messages of 50 MB each over each node's link.
        (100e6, 8, TWO_LEVELS, 0.015 + 2 * (1e-3 + 0.05)),
        (100e6, 10, TWO_LEVELS, 0.015 + 4 * (1e-3 + 100e6 / 3 / 1e9)),  # three nodes
    ],
)
def test_time_of_a_ring(size, devices, network, expected):
    assert allreduce_s(size, devices, network) == pytest.approx(expected)


ALL_LATE = {"late_bytes": 100e6}


@each(
    ("more", "backward_s", "devices", "network", "fusion", "expected"),
    [
        ({}, 0.0, 4, SLOW, Fusion(), RING),  # without a backward pass everything is exposed
        # In messages of 40, 40 and 20 MB the bandwidth's part is the same, and the latency counts three times.
        ({}, 0.0, 4, SLOW, Fusion(40e6), 18e-5 + 0.15),
        ({}, 0.0, 1, SLOW, Fusion(), 0),
        (ALL_LATE, 0.5, 4, SLOW, Fusion(cycle_s=0.1), RING),  # late gradients are not hidden
        (ALL_LATE, 0.5, 4, SLOW, Fusion(cycle_s=0.2), 0.1 + RING),  # cycles start at 0, 0.2, 0.4 and 0.6 s
        # At 100 MB/s, 50 MB are sent from 0.5 to 1.0 s, and the other 50 MB from 1.0 to 1.5 s.
        ({}, 1.0, 2, Network(Link(100e6, 0.0)), Fusion(cycle_s=0.5), 0.5),
        ({}, 1.0, 2, Network(Link(200e6, 0.0)), Fusion(cycle_s=0.5), 0.25),  # all but the last 50 MB before the end
        ({}, 1.0, 2, Network(Link(10e6, 0.0)), Fusion(cycle_s=1e-3), 9.005),  # 10 s for 100 MB, but for the pass
    ],
)
def test_exposed_communication(more, backward_s, devices, network, fusion, expected):
    found = exposed_s(Step(1.5, 0.0, 100e6, **more), backward_s, devices, network, fusion)
    assert found == pytest.approx(expected, rel=6e-4)


def test_strong_and_weak_without_communication():
    step = Step(compute_s=1.0, rest_s=0.1, gradient_bytes=100e6, overhead_s=0.2)  # from the second device on
    for kind, step_s, speedup in ((WEAK, 1.3, 4 * 1.1 / 1.3), (STRONG, 0.55, 1.1 / 0.55)):
        one, four = (project(step, devices, kind, FAST, Fusion(cycle_s=1e-4)) for devices in (1, 4))
        assert one.step_s == pytest.approx(1.1)
        found = (four.step_s, four.speedup, four.efficiency)
        assert found == pytest.approx((step_s, speedup, speedup / 4), rel=5e-4)


def test_only_the_last_pass_of_a_step_hides_communication():
    network, fusion = Network(Link(100e6, 0.0)), Fusion(cycle_s=1e-3)
    whole = project(Step(3.0, 0.0, 100e6), 2, WEAK, network, fusion)
    four = project(Step(3.0, 0.0, 100e6, passes=4), 2, WEAK, network, fusion)
    assert whole.exposed_s < 0.01  # 1 s of sending behind 2 s of backward
    assert four.exposed_s == pytest.approx(0.5, abs=0.01)  # behind 0.5 s


def group_of(folder, **flags):
    """The group of a single run in `folder`."""
    make_run(folder, **flags)
    (group,) = comparison.grouped([reading.read(folder)])
    return group


def both(group):
    return projection.both_kinds(group, [("net", SLOW)])


def devices_of(projected):
    return [point.devices for point in projected.series["net", False]]


def test_the_step_of_one_device_comes_from_the_phases(tmp_path):
    group = group_of(tmp_path / "run", windows_per_s=10)
    for kind in (STRONG, WEAK):
        step = projection.measured_step(group, kind)
        # 16 windows at 10/s take 1.6 s, a tenth of it in the optimizer. A million weights have four bytes each.
        assert (step.compute_s, step.rest_s, step.gradient_bytes) == pytest.approx((1.44, 0.16, 4e6))
        assert (step.passes, step.overhead_s) == (1, pytest.approx(1e-4))
    halved = in_fp16(Step(1.0, 0.0, 100e6, late_bytes=20e6))
    assert (halved.gradient_bytes, halved.late_bytes) == (50e6, 10e6)


def test_the_devices_of_a_baseline_share_its_windows_and_passes(tmp_path):
    # A step of 0.8 s: 0.08 optimizer, 0.2 exposed, and 0.52 computation of a device with its 8 windows.
    group = group_of(tmp_path / "run", strategy="horovod", ranks=2, windows_per_s=20, exposed_comm_s=0.2)
    # dp: one process with four GPUs, each with 4 of the 16 windows in a single pass of 0.36 s.
    in_one = group_of(tmp_path / "dp", strategy="dp", devices_per_rank=4, windows_per_s=40)
    for (strong, weak), devices, compute_s, rest_s in ((both(group), 2, 0.52, 0.08), (both(in_one), 4, 0.36, 0.04)):
        assert (strong.size, weak.size) == (16, 16 / devices)
        assert (strong.step.passes, weak.step.passes) == (devices, 1)  # one device takes them one after the other
        seconds = (strong.step.compute_s, weak.step.compute_s, strong.step.rest_s, weak.step.rest_s)
        assert seconds == pytest.approx((devices * compute_s, compute_s, rest_s, rest_s))


def test_a_fixed_global_batch_ends_at_one_window_each_and_weak_scaling_does_not(tmp_path):
    strong, weak = both(group_of(tmp_path / "run", batch=16))
    assert devices_of(strong) == [1, 2, 4, 8, 16]
    assert strong.ends == "ends at 16 devices: a global batch of 16 windows has less than one for each of 32 devices"
    assert devices_of(weak) == [2**power for power in range(11)]
    assert weak.ends == "ends at 1024 devices: the projection's limit"
    assert strong.series["net", True][1].step_s <= strong.series["net", False][1].step_s
    strong, weak = both(group_of(tmp_path / "one", batch=1))
    assert not strong.series and strong.ends.startswith("not possible: it ends at 1 device: a global batch of 1 window")
    assert devices_of(weak)[-1] == 1024


def projected_rows(out, kind, wire="fp32"):
    with (out / "projection.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if (row["scaling"], row["wire"]) == (kind, wire)]


def test_one_run_is_enough(tmp_path, capsys):
    make_run(tmp_path / "run")
    out = tmp_path / "out"
    out.mkdir()
    written.claim(out, "report.csv", command="report")
    (out / "report.csv").write_text("an earlier report's")
    assert main([str(tmp_path / "run"), "--out", str(out), "--gbps", "25"]) == 0
    text = (out / "report.md").read_text()
    page = (out / "report.html").read_text()
    ends = "ends at 16 devices: a global batch of 16 windows"
    assert ends in page and ends in text and ends in capsys.readouterr().out
    assert "## Projection. Strong scaling: global batch 16" in text
    assert "## Projection. Weak scaling: 16 windows per device and step" in text
    assert text.startswith("# Run ") and "Finished:" in text and "## Without a speed-up" not in text
    for kind, last in ((STRONG, 16), (WEAK, 1024)):
        found = projected_rows(out, kind)[-1]
        expected = project(Step(1.44, 0.16, 4e6, overhead_s=1e-4), last, kind, Network(link_of(25, 20)))
        assert (found["devices"], found["size"], found["baseline"]) == (str(last), "16", "none, 1 rank")
        assert float(found["step_s"]) == pytest.approx(expected.step_s)
        with Image.open(out / f"{kind}_16_projected.png") as image:
            assert image.size[0] >= 1000 and len(set(image.convert("L").tobytes())) > 20
        assert undocumented([found], "Report CSV files") == [] and found["network"] == "25 Gb/s"
    assert not (out / "report.csv").exists()


@each(
    ("changed", "flags", "message"),
    [
        ({"exposed_comm_s": None}, [], "not possible: none, 1 rank lacks phases"),
        ({"work": {"the model": "?"}}, [], "not possible: none, 1 rank does not record the number of weights"),
        ({}, ["--baseline", "horovod:2"], "Projection not possible: none of these runs is horovod:2"),
    ],
)
def test_error_for_one_run_that_cannot_be_projected(tmp_path, capsys, changed, flags, message):
    make_run(tmp_path / "run", **changed)
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--gbps", "25", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_published_series_are_off_by_less_than_3_points():
    model, bound = (fmean(published_figures.errors(cost)) for cost in (projection.NS_PER_WEIGHT, 0.0))
    assert model < 3 < bound
