"""What a step's numbers become: means and times per phase, the summary of all steps, steps without a gradient."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_metrics_log import Clock
from test_world import make_world
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.data.sources.squad import from_questions, open_file
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed import events
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.monitoring import PHASES
from hvd_bert.monitoring.peaks import peak_flops, published_peak
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.tasks.question_answering import QuestionAnswering, QuestionSet
from hvd_bert.tools.bench.__main__ import parse
from hvd_bert.tools.bench.speed import random_task
from hvd_bert.training import meter as module
from hvd_bert.training.breakdown import Breakdown, describe_steps
from hvd_bert.training.health import LIMIT, LIMIT_LATER, LIMIT_SCALED, MAX_EVENTS, Health
from hvd_bert.training.loop import Training
from hvd_bert.training.meter import Meter
from hvd_bert.training.start import Start, prepare

FINITE = torch.tensor(1.0)  # the norm of a gradient


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def equal_ranks(size: int) -> SimpleNamespace:
    """Ranks that are all equal to this one."""
    same = lambda table: table[:1].expand_as(table)  # noqa: E731
    waits: list[list[str]] = []

    def limit_wait(names):
        return nullcontext(waits.append(names()))

    return SimpleNamespace(size=size, rank=0, device=torch.device("cpu"), sum=same, limit_wait=limit_wait, waits=waits)


def batch(num_windows: int, num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(num_windows=num_windows, num_tokens=num_tokens, num_positions=2 * num_tokens)


def without_phases(row: dict[str, float]) -> dict[str, float]:
    """The row without its phases."""
    return {key: value for key, value in row.items() if not key.startswith(tuple(PHASES))}


def test_meter(clock):
    meter = Meter(equal_ranks(4))

    def steps(*losses):
        for loss in losses:
            for _ in range(2):  # each is a share of the step's loss, as for the strategy
                meter.add(torch.tensor(loss / 2, requires_grad=True), batch(4, 100))
            meter.end_step(FINITE)
            clock.now += 0.5

    steps(5.0, 4.0, 3.0)
    row = {"windows_per_s": 64, "tokens_per_s": 1600, "padding_share": 0.5, "step_s": 0.5}
    assert without_phases(meter.read(3)) == pytest.approx({"loss": 4.0, **row})
    with meter.paused():
        clock.now += 1000.0  # an evaluation
    steps(2.0, 1.0)
    assert without_phases(meter.read(5)) == pytest.approx({"loss": 1.5, **row})
    rates = {"train_samples_per_second": 64, "train_steps_per_second": 2.0, "train_tokens_per_second": 1600}
    totals = {"train_runtime": 2.5, "train_samples": 160, "train_loss": 3.0, "skipped_steps": 0}
    assert meter.results() == pytest.approx(rates | totals)


def test_waits_for_the_device_are_watched_but_for_the_first_step():
    world = equal_ranks(2)
    meter = Meter(world)
    for step in range(3):
        meter.add(torch.ones(()), batch(1, 1))
        meter.end_step(FINITE)
        assert len(world.waits) == max(0, step - 1)
    meter.read(3)
    assert world.waits == 2 * [["the last step's gradients"]]


def test_phases_leave_no_gaps(clock):
    """A step like the loop's: two passes, a backward pass that waits for other ranks, and a checkpoint."""
    meter = Meter(equal_ranks(1))

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
                meter.gradients_computed()  # of the last parameter
            after(0.5)
        meter.add(torch.tensor(1.0), batch(1, 1))
    with meter.phase("other"):
        after(4.0)
        meter.lap("other")
        with meter.phase("checkpoint"):
            after(8.0)
        after(16.0)
    with meter.phase("exposed_comm"):
        after(32.0)
    after(64.0)  # counts for the next phase
    with meter.phase("optimizer"):
        after(128.0)
    row = meter.read(1)
    assert [row[f"{phase}_s"] for phase in PHASES] == [2.0, 4.75, 32.5, 192.0, 8.0, 20.0]
    assert row["step_s"] == sum([2.0, 4.75, 32.5, 192.0, 8.0, 20.0])
    assert [row[f"{phase}_share"] for phase in PHASES] == [row[f"{phase}_s"] / row["step_s"] for phase in PHASES]


def test_the_other_ranks_have_times_of_their_own(clock):
    """Rank 1 waits half as long for data, and as long for rank 0."""
    world = equal_ranks(2)
    world.sum = lambda table: torch.stack([table[0], table[0] + torch.tensor([0.0] * 4 + [-1, 0, 1, 0, 0, 0])])
    meter = Meter(world)
    meter.add(torch.tensor(1.0), batch(1, 1))
    for phase, seconds in (("data", 2.0), ("compute", 3.0)):
        clock.now += seconds
        meter.lap(phase)
    row = meter.read(1)
    assert (row["data_s"], row["data_min_s"], row["data_max_s"]) == (1.5, 1.0, 2.0)
    assert (row["exposed_comm_s"], row["exposed_comm_share"], row["step_s"]) == (0.5, 0.1, 5.0)


def test_communication_that_cannot_be_told_is_part_of_computing(clock):
    meter = Meter(equal_ranks(1), separates_comm=False)
    meter.add(torch.tensor(1.0), batch(1, 1))
    for phase in ("compute", "exposed_comm", "optimizer"):
        clock.now += 1.0
        meter.lap(phase)
    row = meter.read(1)
    assert (row["compute_s"], row["optimizer_s"], row["step_s"]) == (2.0, 1.0, 3.0)
    assert not [name for name in row if name.startswith("exposed_comm")]


LENGTHS = np.array([10, 20, 30, 40, 50, 60, 70], dtype=np.int32)


def flops_of(lengths, passes: int) -> float:
    return 1e9 * float(np.square(lengths).sum()) + 1e6 * passes


class Looks:
    """Returns the given looks: seconds per phase of two ranks, [ranks, phases]."""

    phases = PHASES

    def __init__(self, last_step: int = 0, looks: tuple[list[list[float]], ...] = ()) -> None:
        self.last_step = last_step
        self.looks = iter(looks)

    def read(self, step: int) -> dict[str, float]:
        steps, self.last_step = step - self.last_step, step
        self.phase_s = torch.tensor(next(self.looks), dtype=torch.float64)
        self.sums = {"windows": 2 * steps, "tokens": 80 * steps, "positions": 100 * steps, "watched": steps}
        self.sums["seconds"] = float(self.phase_s[0].sum())
        return {"loss": 1.0}


def plan(size: int = 2) -> BatchPlan:
    return BatchPlan(LENGTHS, global_batch=2, accumulation=1, size=size, seed=0, crossover=4608)


def tokens(step: int) -> np.ndarray:
    return LENGTHS[plan().step_windows(step)]


WARM_UP = [[9.0] * 6] * 2
TWO_STEPS = [[0.5, 3.0, 0.25, 0.1, 0.1, 0.05], [0.25, 3.0, 0.5, 0.1, 0.1, 0.05]]
ONE_STEP = [[0.25, 1.5, 0.1, 0.05, 0.0, 0.1], [0.25, 1.25, 0.35, 0.05, 0.0, 0.1]]


def trained(peak: float | None = None) -> Breakdown:
    breakdown = Breakdown(Looks(looks=(WARM_UP, TWO_STEPS, ONE_STEP)), plan(), flops_of, peak, 0)
    for step in range(4):
        breakdown.count(step)
        if step != 1:
            breakdown.read(step + 1)
    return breakdown


def test_sums_leave_the_first_line_out():
    found = trained(peak=1e12).results()
    assert (found["taken_steps"], found["steps"]) == (4, 3)
    assert found["step"] == pytest.approx({"ms": 2000.0, "min_ms": 2000.0, "max_ms": 2000.0, "share": 1.0})
    exposed = {"ms": 200.0, "min_ms": 350 / 3, "max_ms": 850 / 3, "share": 0.1}
    assert found["phases"]["exposed_comm"] == pytest.approx(exposed)
    assert list(found["phases"]) == list(PHASES)
    assert sum(figures["share"] for figures in found["phases"].values()) == pytest.approx(1)
    flops = sum(flops_of(tokens(step), passes=2) for step in (1, 2, 3))
    assert found["tflops_per_s"] == pytest.approx(flops / 6.0 / 1e12)
    assert found["mfu"] == pytest.approx(flops / 6.0 / 1e12)
    assert (found["windows_per_s"], found["tokens_per_s"], found["padding_share"]) == pytest.approx((1.0, 40.0, 0.2))
    ratios = [tokens(step).max() / tokens(step).sum() * 2 for step in (1, 2, 3)]  # at most one window per rank
    assert found["imbalance"] == pytest.approx(np.mean(ratios))
    assert "mfu" not in trained().results()


def test_line_after_a_stop_is_that_of_a_run_never_stopped():
    whole = Breakdown(Looks(2, looks=(TWO_STEPS,)), plan(), flops_of, 1e12, 2)
    resumed = Breakdown(Looks(2, looks=(TWO_STEPS,)), plan(), flops_of, 1e12, 4)  # steps 2 and 3 before the stop
    for step in (2, 3, 4):
        whole.count(step)
    resumed.count(4)
    assert whole.read(5) == resumed.read(5)


def results(peak: float | None = None, device: str = "cpu") -> dict:
    checkpoints = {"checkpoints": 2, "checkpoint_pause_s": 0.25, "checkpoint_write_s": 1.0}
    place = {"world_size": 2, "ranks": [{"device": device}], "device_name": "GPU of tomorrow", "precision": "bf16"}
    evaluations = {"evaluations": 2, "evaluation_s": 4.0}
    return {"breakdown": trained(peak).results(), "strategy": "horovod"} | evaluations | checkpoints | place


def test_table_at_the_end():
    lines = describe_steps(results(peak=1e12))
    words = [line.split() for line in lines]
    assert ["exposed", "communication", "200.0", "116.7", "283.3", "10.0%"] in words
    assert ["step", "2000.0", "2000.0", "2000.0", "100.0%"] in words
    assert ["evaluation", "(additional)", "1000.0", "50.0%"] in words
    assert "2 checkpoint(s): training waited 0.25 s, writing took 1.00 s." in lines
    assert any("MFU" in line and "padding 20.0%" in line for line in lines)


def test_table_of_other_runs():
    found = results() | {"unit": "images"}
    found["breakdown"]["tokens_per_s"] = found["breakdown"]["windows_per_s"]
    text = "\n".join(describe_steps(found))
    assert " images/s" in text and not [word for word in ("token", "padding", "MFU") if word in text]
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


class Asked(TorchDispatchMode):
    """The steps in which a tensor's value is read, which on a GPU waits for all of its work."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training, self.steps = training, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.steps.add(self.training.state.step)
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_between_two_lines(tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 1100, **shape}))
    _, config = parse(["--steps", "4", "--repeats", "2", "--gradient_accumulation_steps", "2", "--strategy", "none"])
    world = make_world()
    start = Start(config, random_task(str(tmp_path), 64, config, world))
    logger = MetricsLogger(tmp_path, enabled=False)
    training = Training(start.in_folder(tmp_path), prepare(start, world), None, logger, world)
    with Asked(training) as asked:
        training.run()
    assert training.state.step == 12
    assert asked.steps == {1, 4, 8, 12}


BAD, GOOD = math.nan, 1.0
WINDOWS = 8


class Watched:
    """The health of rank 0 of 2 ranks; the other rank does the same work."""

    def __init__(self, fp16: bool = False) -> None:
        self.world = make_world(size=2)
        self.other = 0.0
        self.world.allgather = lambda mine: [mine, self.other]  # type: ignore[method-assign]
        self.world.sum = lambda table: table[:1].expand_as(table)  # type: ignore[method-assign]
        self.meter = Meter(self.world)
        plan = BatchPlan(np.full(64, 20, np.int32), WINDOWS, accumulation=1, size=2, seed=0, crossover=4608)
        self.plan, self.step = plan, 0
        self.health = Health(self.meter, plan, self.world, 0, lambda ids: [f"w{n}" for n in ids], fp16)

    def train(self, loss: float, grad_norm: float = GOOD, other: float | None = None) -> None:
        self.meter.add(torch.tensor(loss), SimpleNamespace(num_windows=4, num_tokens=80, num_positions=80))
        self.meter.end_step(torch.tensor(grad_norm))  # which reports the step before
        self.other = loss if other is None else other
        self.step += 1

    def look(self) -> dict[str, float]:
        row = self.meter.read(self.step)
        self.health.check(self.step)
        return row


@pytest.fixture
def recorded(monkeypatch) -> list[dict[str, Any]]:
    """The events, without warnings: those are only recorded once another test has set up logging."""
    found: list[dict[str, Any]] = []

    def add(event: str, **values: Any) -> None:
        if event != "warning":
            found.append({"event": event, **values})

    monkeypatch.setattr(events, "add", add)
    return found


def test_only_applied_steps_advance_the_schedule():
    run, applied = Watched(fp16=True), []
    run.meter.on_applied = lambda: applied.append(run.step)
    for norm in (1.0, math.inf, 1.0):
        run.train(2.0, norm)
    run.meter.settle()
    assert len(applied) == 2


def test_skipped_step_is_a_warning_with_its_windows(recorded, caplog):
    run = Watched()
    run.train(2.0)
    run.train(1.0, BAD, other=math.nan)
    run.train(4.0)
    row = run.look()
    assert "rank 1 is nan at step 2" in caplog.text
    assert f"w{run.plan.rank_windows(1, 1)[0][0]}" in caplog.text
    assert row["loss"] == run.meter.results()["train_loss"] == 3.0  # of the other steps
    run.train(2.0, math.inf)  # on all ranks
    run.meter.settle()
    assert [part["rank"] for part in recorded[1]["batch"]] == [0, 1]
    assert "The gradient is NaN or infinite at step 4" in caplog.text


# With fp16, no scale makes up for a loss of NaN.
@pytest.mark.parametrize(
    ("fp16", "loss", "first", "later"), [(True, math.nan, LIMIT, LIMIT), (True, 1.0, LIMIT_SCALED, LIMIT_LATER)]
)
def test_training_ends_after_so_many_skipped_steps_in_a_row(fp16, loss, first, later, recorded):
    run, never = Watched(fp16), Watched(fp16)
    for limit in (first, later):  # a good step in between starts the count again
        for _ in range(limit - 1):
            run.train(loss, BAD)
        run.train(2.0)
    for watched, limit in ((run, later), (never, first)):
        for _ in range(limit):
            watched.train(loss, BAD)
        with pytest.raises(CollectiveError, match=f" at step {watched.step}: .* last {limit} steps.*: w") as ended:
            watched.meter.settle()
        assert ended.value.status == EXIT_FAILURE and recorded[-1]["step"] == watched.step
        assert ("ranks 0, 1 is nan" in str(ended.value)) == math.isnan(loss)
        assert ("--learning_rate" in str(ended.value)) == (watched is run), "the first weights had none"


def test_infinite_loss_with_a_finite_gradient_ends_the_training(recorded):
    run = Watched()
    run.train(math.nan, BAD)  # is skipped, and is not the cause
    assert math.isnan(run.look()["loss"])
    run.train(math.inf)
    run.train(1.0)
    with pytest.raises(CollectiveError, match="The loss is inf at step 3, or since the last log line") as ended:
        run.look()
    assert ended.value.status == EXIT_FAILURE


def test_sums_without_the_skipped_step_are_resumed(recorded):
    first, second = Watched(), Watched()
    first.train(2.0)
    first.look()
    first.train(math.nan, BAD)
    first.train(4.0)
    since = first.meter.since_last_log()
    assert since[0] == 4.0
    second.meter.restore(first.meter.state(), since, 3)
    for run in (first, second):
        run.step = 3
        run.train(6.0)
        assert run.meter.read(4)["loss"] == 5.0
        assert run.meter.results()["train_loss"] == 4.0


def test_events_are_limited(recorded):
    run = Watched(fp16=True)
    for _ in range(MAX_EVENTS + 5):
        run.train(math.nan, BAD)
        run.train(1.0)
    run.meter.settle()
    assert len(recorded) == MAX_EVENTS


def test_windows_are_named_by_their_questions_or_numbered(make_questions, write_squad):
    questions, windows = make_questions(3), WindowTable.from_columns({"question": [0, 1, 1, 2]})
    gone = write_squad(questions)
    lost = open_file(gone, version_2_with_negative=False)
    gone.unlink()
    for source, names in ((from_questions("made", questions), ["q1", "q0"]), (lost, ["number 2", "number 0"])):
        task = QuestionAnswering.__new__(QuestionAnswering)
        task.train = QuestionSet(len, np.ones(4, np.int32), "", source=source, windows=windows)
        assert task.window_names(np.array([2, 0])) == names
