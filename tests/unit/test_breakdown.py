"""Step-time summary: phases, rates and FLOP/s."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.monitoring import PHASES
from hvd_bert.monitoring.peaks import peak_flops, published_peak
from hvd_bert.training.breakdown import Breakdown, describe_steps

LENGTHS = np.array([10, 20, 30, 40, 50, 60, 70], dtype=np.int32)


def flops_of(lengths, micro_batches: int) -> float:
    return 1e9 * float(np.square(lengths).sum()) + 1e6 * micro_batches


class FakeMeter:
    """A fake meter of two ranks. Each `read` uses the next of `lines`: seconds, [ranks, phases]."""

    phases = PHASES

    def __init__(self, last_step: int, *lines: list[list[float]]) -> None:
        self.last_step = last_step
        self.lines = iter(lines)

    def end_line(self, step: int) -> None:
        self.line = step

    def read(self) -> dict[str, float]:
        steps, self.last_step = self.line - self.last_step, self.line
        self.phase_s = torch.tensor(next(self.lines), dtype=torch.float64)
        self.sums = {"windows": 2 * steps, "tokens": 80 * steps, "positions": 100 * steps, "watched": steps}
        self.sums["seconds"] = float(self.phase_s[0].sum())
        return {"loss": 1.0}


def plan() -> BatchPlan:
    return BatchPlan(LENGTHS, global_batch=2, accumulation=1, size=2, seed=0, crossover=4608)


def tokens(step: int) -> np.ndarray:
    return LENGTHS[plan().step_windows(step)]


WARM_UP = [[9.0] * 6] * 2
TWO_STEPS = [[0.5, 3.0, 0.25, 0.1, 0.1, 0.05], [0.25, 3.0, 0.5, 0.1, 0.1, 0.05]]
ONE_STEP = [[0.25, 1.5, 0.1, 0.05, 0.0, 0.1], [0.25, 1.25, 0.35, 0.05, 0.0, 0.1]]


def trained(peak: float | None = None) -> Breakdown:
    breakdown = Breakdown(FakeMeter(0, WARM_UP, TWO_STEPS, ONE_STEP), plan(), flops_of, peak, 0)
    for step in range(4):
        breakdown.count(step)
        if step in (1, 3):
            breakdown.read()
        if step != 1:
            breakdown.end_line(step + 1)
    breakdown.read()
    return breakdown


def test_sums_exclude_the_first_line():
    found = trained(peak=1e12).results()
    assert (found["taken_steps"], found["steps"]) == (4, 3)
    assert found["step"] == pytest.approx({"ms": 2000.0, "min_ms": 2000.0, "max_ms": 2000.0, "share": 1.0})
    exposed = {"ms": 200.0, "min_ms": 350 / 3, "max_ms": 850 / 3, "share": 0.1}
    assert found["phases"]["exposed_comm"] == pytest.approx(exposed)
    assert list(found["phases"]) == list(PHASES)
    assert sum(figures["share"] for figures in found["phases"].values()) == pytest.approx(1)
    flops = sum(flops_of(tokens(step), micro_batches=2) for step in (1, 2, 3))
    assert found["tflops_per_s"] == pytest.approx(flops / 6.0 / 1e12)
    assert found["mfu"] == pytest.approx(flops / 6.0 / 1e12)
    assert (found["windows_per_s"], found["tokens_per_s"], found["padding_share"]) == pytest.approx((1.0, 40.0, 0.2))
    ratios = [tokens(step).max() / tokens(step).sum() * 2 for step in (1, 2, 3)]  # each rank has at most one window
    assert found["imbalance"] == pytest.approx(np.mean(ratios))
    assert "mfu" not in trained().results()


def test_line_after_a_resume_equals_the_uninterrupted_runs():
    whole = Breakdown(FakeMeter(2, TWO_STEPS), plan(), flops_of, 1e12, 2)
    resumed = Breakdown(FakeMeter(2, TWO_STEPS), plan(), flops_of, 1e12, 4)  # steps 2 and 3 ran before the stop
    for step in (2, 3, 4):
        whole.count(step)
    resumed.count(4)
    for breakdown in (whole, resumed):
        breakdown.end_line(5)
    assert whole.read() == resumed.read()


def results(peak: float | None = None, device: str = "cpu") -> dict:
    checkpoints = {"checkpoints": 2, "checkpoint_pause_s": 0.25, "checkpoint_write_s": 1.0}
    devices = {"world_size": 2, "ranks": [{"device": device}], "device_name": "GPU of tomorrow", "precision": "bf16"}
    evaluations = {"evaluations": 2, "evaluation_s": 4.0}
    return {"breakdown": trained(peak).results(), "strategy": "horovod"} | evaluations | checkpoints | devices


def test_step_time_summary():
    lines = describe_steps(results(peak=1e12))
    words = [line.split() for line in lines]
    assert ["exposed", "communication", "200.0", "116.7", "283.3", "10.0%"] in words
    assert ["step", "2000.0", "2000.0", "2000.0", "100.0%"] in words
    assert "2 evaluation(s) in 4.0 s." in lines
    assert "2 checkpoint(s): training waited 0.25 s, writing took 1.00 s." in lines
    assert any("MFU" in line and "padding 20.0%" in line for line in lines)


def test_step_time_summary_without_tokens_or_mfu():
    found = results() | {"unit": "images"}
    found["breakdown"]["tokens_per_s"] = found["breakdown"]["windows_per_s"]
    text = "\n".join(describe_steps(found, resumed=True))
    assert " images/s since the resume" in text and not [word for word in ("token", "padding", "MFU") if word in text]
    (line,) = [line for line in describe_steps(results(device="cuda:0")) if "MFU" in line]
    assert "GPU of tomorrow in bf16" in line and "--peak_tflops" in line


def test_published_peaks():
    assert published_peak("Tesla V100-SXM2-32GB", "tf32") == pytest.approx(15.7e12), "it has no TF32 and uses fp32"
    assert published_peak("Tesla V100-SXM2-32GB", "bf16") is None
    assert published_peak("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16") is None


def test_peak_of_all_devices(monkeypatch):
    world = SimpleNamespace(device=torch.device("cuda"), devices=2, allgather=lambda mine: [mine, mine])
    args = SimpleNamespace(tf32=True, precision="fp32")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-PCIE-40GB")
    assert peak_flops(args, None, world) == pytest.approx(4 * 156e12)
    assert peak_flops(args, 2.5, world) == pytest.approx(4 * 2.5e12)
    world.allgather = lambda mine: [mine, None]  # the other rank has another GPU
    assert peak_flops(args, None, world) is None
    world.device, world.allgather = torch.device("cpu"), lambda mine: [mine]
    assert peak_flops(args, None, world) is None
