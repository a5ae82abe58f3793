"""The meter: mean losses, rates, and times per phase."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_metrics_log import Clock

from hvd_bert.monitoring import PHASES
from hvd_bert.training import meter as module
from hvd_bert.training.meter import Meter

FINITE = torch.tensor(1.0)  # a gradient norm


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def equal_ranks(size: int) -> SimpleNamespace:
    """Make a world in which all ranks have the same values. `waits`: the names passed to `limit_wait`."""
    same = lambda table: table[:1].expand_as(table)  # noqa: E731
    waits: list[list[str]] = []

    def limit_wait(names):
        return nullcontext(waits.append(names()))

    return SimpleNamespace(
        size=size, rank=0, device=torch.device("cpu"), gpus=[], sum=same, limit_wait=limit_wait, waits=waits
    )


def batch(num_windows: int, num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(num_windows=num_windows, num_tokens=num_tokens, num_positions=2 * num_tokens)


def read(meter: Meter, step: int) -> dict[str, float]:
    """End a log line after `step` and read its metrics at once."""
    meter.end_line(step)
    meter.settle()
    return meter.read()


def without_phases(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if not key.startswith(tuple(PHASES))}


def test_meter(clock):
    meter = Meter(equal_ranks(4))

    def steps(*losses):
        for loss in losses:
            for _ in range(2):  # each micro-batch contributes half of the step's loss
                meter.add(torch.tensor(loss / 2, requires_grad=True), batch(4, 100))
            meter.end_step(FINITE)
            clock.now += 0.5

    steps(5.0, 4.0, 3.0)
    row = {"windows_per_s": 64, "tokens_per_s": 1600, "padding_share": 0.5, "step_s": 0.5}
    assert without_phases(read(meter, 3)) == pytest.approx({"loss": 4.0, **row})
    with meter.paused():
        clock.now += 1000.0  # an evaluation must not count
    steps(2.0, 1.0)
    assert without_phases(read(meter, 5)) == pytest.approx({"loss": 1.5, **row})
    rates = {"train_samples_per_second": 64, "train_steps_per_second": 2.0, "train_tokens_per_second": 1600}
    totals = {"train_runtime": 2.5, "train_samples": 160, "train_loss": 3.0, "skipped_steps": 0}
    assert meter.results() == pytest.approx(rates | totals)


@pytest.mark.parametrize("ends", [True, False], ids=["read late", "lost before"])
def test_line_that_ended_before_a_later_step(clock, ends):
    """The line excludes step 3. If Horovod elastic resumes before `read`, the next line covers all steps."""
    meter, resumed = Meter(equal_ranks(2)), Meter(equal_ranks(2))

    def step(meter: Meter, loss: float) -> None:
        meter.add(torch.tensor(loss), batch(4, 100))
        clock.now += loss
        meter.end_step(FINITE if loss < 9 else torch.tensor(torch.inf))

    for loss in (4.0, 2.0):
        step(meter, loss)
    meter.end_line(2)
    step(meter, 9.0)
    row = {"padding_share": 0.5}
    if ends:
        row |= {"loss": 3.0, "windows_per_s": 16 / 6, "tokens_per_s": 400 / 6, "step_s": 3.0, "grad_norm": 1.0}
        assert without_phases(meter.read()) | {"grad_norm": meter.grad_norm} == pytest.approx(row)
        row |= {"loss": torch.nan, "windows_per_s": 8 / 9, "tokens_per_s": 200 / 9, "step_s": 9.0}
        del row["grad_norm"]
        assert without_phases(read(meter, 3)) == pytest.approx(row, nan_ok=True)
    else:
        since = meter.since_last_log()
        resumed.restore(meter.state(), since, 3)
        step(resumed, 3.0)
        row |= {"loss": 3.0, "windows_per_s": 32 / 18, "tokens_per_s": 800 / 18, "step_s": 4.5}
        shown = resumed.so_far(4)
        assert without_phases(read(resumed, 4)) == pytest.approx(row)
        assert shown == pytest.approx({name: row[name] for name in ("loss", "windows_per_s")})


def test_energy_of_all_ranks_over_a_resume(clock, monkeypatch):
    """The GPU of each of two ranks takes 100 W."""
    monkeypatch.setattr(module, "energy_j", lambda gpus: 100 * clock.now)
    world = equal_ranks(2)
    world.gpus = [torch.device("cuda")]

    def train(meter: Meter, step: int) -> Meter:
        meter.add(torch.tensor(1.0), batch(1, 1))
        meter.end_step(FINITE)
        clock.now += 18.0
        read(meter, step)
        return meter

    meter = train(Meter(world), 1)
    with meter.paused():
        clock.now += 1000.0  # an evaluation
    assert meter.results()["energy_wh"] == 1.0
    clock.now += 9.0
    saved, unknown, since = meter.state(2 * meter.joules()), meter.state(), meter.since_last_log()
    clock.now += 1000.0  # the job waits to be resumed
    for state, energy in ((saved, 2.5), (unknown, None)):
        resumed = Meter(world)
        resumed.restore(json.loads(json.dumps(state)), since, 1)
        assert train(resumed, 2).results().get("energy_wh") == energy


def test_waits_for_the_device_are_watched_except_the_first():
    world = equal_ranks(2)
    meter = Meter(world)
    for step in range(3):
        meter.add(torch.ones(()), batch(1, 1))
        meter.end_step(FINITE)
        assert len(world.waits) == max(0, step - 1)
    read(meter, 3)
    assert world.waits == 2 * [["the last step's gradients"]]


def test_phases_leave_no_gaps(clock):
    """Time a step of two micro-batches, of which the second waits for other ranks, and a checkpoint."""
    meter = Meter(equal_ranks(2))

    def waited_for():
        for item in "ab":
            clock.now += 1.0
            yield item

    def after(seconds: float) -> None:
        clock.now += seconds

    for item in meter.timed("data", waited_for()):
        with meter.phase("compute"):
            after(2.0)
            if item == "b":
                meter.gradients_computed()
                after(0.25)
                meter.gradients_computed()  # called once per parameter; the last call ends the computation
            after(0.5)
        meter.add(torch.tensor(1.0), batch(1, 1))
    with meter.phase("other"):
        after(4.0)
        meter.end_interval("other")
        with meter.phase("checkpoint"):
            after(8.0)
        after(16.0)
    with meter.phase("exposed_comm"):
        after(32.0)
    after(64.0)  # time between phases counts for the next phase
    with meter.phase("optimizer"):
        after(128.0)
    row = read(meter, 1)
    assert [row[f"{phase}_s"] for phase in PHASES] == [2.0, 4.75, 32.5, 192.0, 8.0, 20.0]
    assert row["step_s"] == sum([2.0, 4.75, 32.5, 192.0, 8.0, 20.0])
    assert [row[f"{phase}_share"] for phase in PHASES] == [row[f"{phase}_s"] / row["step_s"] for phase in PHASES]


def test_phases_have_a_range_over_the_ranks(clock):
    """Rank 1 gets its data a second earlier than rank 0, then waits a second for rank 0."""
    world = equal_ranks(2)
    world.sum = lambda table: torch.stack([table[0], table[0] + torch.tensor([0.0] * 4 + [-1, 0, 1, 0, 0, 0, 0])])
    meter = Meter(world)
    meter.add(torch.tensor(1.0), batch(1, 1))
    for phase, seconds in (("data", 2.0), ("compute", 3.0)):
        clock.now += seconds
        meter.end_interval(phase)
    row = read(meter, 1)
    assert (row["data_s"], row["data_min_s"], row["data_max_s"]) == (1.5, 1.0, 2.0)
    assert (row["exposed_comm_s"], row["exposed_comm_share"], row["step_s"]) == (0.5, 0.1, 5.0)


@pytest.mark.parametrize(("size", "separates"), [(2, False), (1, True)], ids=["not separate", "one rank"])
def test_communication_is_absent_where_it_is_not_separate_or_there_is_none(clock, size, separates):
    meter = Meter(equal_ranks(size), separates)
    meter.add(torch.tensor(1.0), batch(1, 1))
    for phase in ("compute", "exposed_comm", "optimizer"):
        clock.now += 1.0
        meter.end_interval(phase)
    row = read(meter, 1)
    assert (row["compute_s"], row["optimizer_s"], row["step_s"]) == (2.0, 1.0, 3.0)
    assert not [name for name in row if name.startswith("exposed_comm")]
