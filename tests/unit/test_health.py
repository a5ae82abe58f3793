"""Steps without a finite gradient, jumps of the loss, and weights that differ between ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_world import heard, make_world
from torch import nn

from hvd_bert.config.command_line import parse
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.data.sources.squad import from_questions, open_file
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed import events
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_FAILURE, UserError
from hvd_bert.strategies.base import StrategyOptions, strategy_class
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.train.health import LIMIT, LIMIT_LATER, LIMIT_SCALED, MAX_EVENTS, Health, check_copies, checksum
from hvd_bert.train.meter import Meter

BAD, GOOD = math.nan, 1.0
WINDOWS = 8


class Watched:
    """The health of rank 0 of 2 ranks; `losses` has those of the other rank, which are gathered and summed."""

    def __init__(self, fp16: bool = False) -> None:
        self.world = make_world(size=2)
        self.other = 0.0
        self.world.allgather = lambda mine: [mine, self.other]  # type: ignore[method-assign]
        self.world.sum = self._sum  # type: ignore[method-assign]
        self.meter = Meter(self.world)
        plan = BatchPlan(np.full(64, 20, np.int32), WINDOWS, accumulation=1, size=2, seed=0, crossover=4608)
        self.plan, self.step = plan, 0
        self.others: list[float] = []
        self.health = self.begun(0, fp16)

    def begun(self, step: int, fp16: bool = False) -> Health:
        return Health(self.meter, self.plan, self.world, step, lambda ids: [f"w{n}" for n in ids], fp16)

    def _sum(self, table: torch.Tensor) -> torch.Tensor:
        table[1] = table[0]
        if self.others:
            table[1, -len(self.others) :] = torch.tensor(self.others)
        self.others = []
        return table

    def train(self, loss: float, grad_norm: float = GOOD, other: float | None = None) -> None:
        self.meter.add(torch.tensor(loss), SimpleNamespace(num_windows=4, num_tokens=80, num_positions=80))
        self.meter.end_step(torch.tensor(grad_norm))  # which reports the step before
        self.other = loss if other is None else other
        self.others.append(self.other)
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


def test_skipped_step_names_the_rank_and_its_windows(recorded, caplog):
    run = Watched()
    run.train(2.0)
    run.train(1.0, BAD, other=math.nan)
    run.train(4.0)
    row = run.look()
    (event,) = recorded
    windows = [f"w{n}" for n in run.plan.rank_windows(1, 1)[0]]
    assert (event["event"], event["step"], event["grad_norm"]) == ("skipped_step", 2, "nan")
    assert event["batch"] == [{"rank": 1, "loss": "nan", "windows": windows}]
    said = "The loss of rank 1 is nan at step 2. The step is skipped: the weights stay as they were. Its windows: "
    assert said + windows[0] in caplog.text
    assert row["loss"] == 3.0  # of the other steps
    results = run.meter.results()
    assert (results["skipped_steps"], results["train_loss"]) == (1, 3.0)


def test_gradient_alone_that_is_not_finite(recorded, caplog):
    run = Watched()
    run.train(2.0, math.inf)
    run.meter.settle()
    assert [part["rank"] for part in recorded[0]["batch"]] == [0, 1]
    assert "The gradient is NaN or infinite at step 1" in caplog.text
    assert "and 0 more" not in caplog.text and caplog.text.count("w") > WINDOWS


@pytest.mark.parametrize(
    ("fp16", "loss", "first", "later"),
    [
        (False, math.nan, LIMIT, LIMIT),
        (False, 1.0, LIMIT, LIMIT),
        (True, math.nan, LIMIT, LIMIT),  # no scale makes up for it
        (True, 1.0, LIMIT_SCALED, LIMIT_LATER),
    ],
    ids=str,
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


def test_run_whose_steps_were_all_skipped_has_trained_nothing(recorded):
    run, resumed = Watched(fp16=True), Watched(fp16=True)
    for _ in range(2):
        run.train(1.0, BAD)
    since = run.meter.since_last_log()
    resumed.meter.restore(run.meter.state(), since, 2)
    for watched, last in ((run, run.health), (resumed, resumed.begun(2))):
        with pytest.raises(CollectiveError, match="all 2 steps were skipped") as ended:
            last.check_end()
        assert ended.value.status == EXIT_FAILURE
        watched.train(1.0)
        last.check_end()


def test_line_of_skipped_steps_only_has_no_loss():
    run = Watched()
    run.train(math.nan, BAD)
    assert math.isnan(run.look()["loss"])
    run.train(3.0)
    assert run.look()["loss"] == 3.0


def test_infinite_loss_with_a_finite_gradient_ends_the_training(recorded):
    run = Watched()
    run.train(math.nan, BAD)  # is skipped, and is not the cause
    run.look()
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


def test_jump_names_the_windows_of_the_highest_rank_first(recorded, caplog):
    run = Watched()
    with caplog.at_level(logging.INFO, "hvd_bert"):
        for step in range(30):
            run.train(2.0 + 0.1 * (step % 3))
        run.look()
        run.train(2.0, other=5.0)
        run.train(2.1)
        run.look()
    (event,) = recorded
    assert (event["event"], event["step"], event["loss"]) == ("loss_jump", 31, 3.5)
    assert event["mean"] == pytest.approx(2.1)
    assert [(part["rank"], part["loss"]) for part in event["batch"]] == [(1, "5.0"), (0, "2.0")]
    first = f"w{run.plan.rank_windows(30, 1)[0][0]}"
    assert (
        f"The loss jumped to 3.5 at step 31; its mean over the 30 steps before is 2.1. Its windows: {first},"
        in caplog.text
    )


@pytest.mark.parametrize("losses", [[3.0] * 10 + [9.0], [1e-4, 2e-4] * 15 + [0.01], [3.0, 1.0] * 15 + [4.0]], ids=str)
def test_what_is_no_jump(losses, recorded):
    """Too few steps before; tiny losses; losses that vary as much anyway."""
    run = Watched()
    for loss in losses:
        run.train(loss)
    run.look()
    assert recorded == []


def test_events_are_limited(recorded):
    run = Watched(fp16=True)
    for _ in range(MAX_EVENTS + 5):
        run.train(math.nan, BAD)
        run.train(1.0)
    run.meter.settle()
    assert len(recorded) == MAX_EVENTS


def test_weights_stay_as_they_were_without_a_finite_gradient():
    model = nn.Linear(2, 2)
    options = StrategyOptions(max_grad_norm=1.0)
    make: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)  # noqa: E731
    strategy = strategy_class("none")(model, make, options, make_world())
    moved = []
    for factor in (1.0, math.nan, math.inf, 1.0):
        before = model.weight.detach().clone()
        strategy.backward(model(torch.ones(1, 2)).sum() * factor)
        strategy.synchronize()
        strategy.clip()
        strategy.step()
        moved.append(not torch.equal(model.weight, before))
    assert moved == [True, False, False, True]
    _, tensors, _ = strategy.state()
    assert torch.isfinite(model.weight).all() and tensors["weight/step"] == 2


def test_one_flipped_bit_is_found():
    weights = torch.randn(50)
    before = checksum(weights)
    bits = weights.view(torch.int32)
    for bit in range(32):
        bits[7] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(torch.int32)
        assert checksum(weights) != before
        bits[7] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(torch.int32)
    assert checksum(weights) == before
    for kind in (torch.bool, torch.bfloat16, torch.float64, torch.int64):
        assert checksum(torch.ones(3, dtype=kind)) != checksum(torch.tensor([1, 0, 1]).to(kind))


@pytest.mark.parametrize(
    ("size", "flipped", "said"),
    [
        (4, [2], "rank 2 on node2 differ from those of the other ranks after step 5, in weight. A memory"),
        (2, [1], "rank 1 on node1 differ from those of the other ranks after step 5, in weight. No majority"),
        (4, [1, 2], "ranks 1, 2 on node1, node2 differ from .* in weight. No majority tells which are right. A memory"),
    ],
)
def test_ranks_whose_weights_differ_are_named(size, flipped, said):
    model = nn.Linear(3, 3)
    good = [int(checksum(weight)) for weight in model.state_dict().values()]
    world = make_world(size=size)
    world.rank_infos = tuple(SimpleNamespace(host=f"node{rank}") for rank in range(size))  # type: ignore[assignment]
    check_copies(model, heard(world, [good] * size), 5)
    sums = [[good[0] + 1, good[1]] if rank in flipped else good for rank in range(size)]
    with pytest.raises(CollectiveError, match="The weights of " + said):
        check_copies(model, heard(world, sums), 5)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "none", "dp"])
def test_strategy_without_copies_refuses_the_flag(strategy):
    with pytest.raises(
        UserError, match=f"--check_weights_steps 5: with --strategy {strategy} the ranks hold no copies"
    ):
        parse(["--strategy", strategy, "--check_weights_steps", "5"])


def test_windows_are_named_by_their_questions(make_questions):
    task = QuestionAnswering.__new__(QuestionAnswering)
    questions, windows = make_questions(3), WindowTable.from_columns({"question": [0, 1, 1, 2]})
    train = SimpleNamespace(windows=windows, source=from_questions("made", questions))
    task.inputs = SimpleNamespace(train=train)  # type: ignore[assignment]
    assert task.window_names(np.array([2, 0])) == [questions[1].id, questions[0].id]


def test_windows_of_a_file_that_is_gone_are_numbered(tmp_path, make_questions, write_squad):
    file = write_squad(make_questions(3))
    task = QuestionAnswering.__new__(QuestionAnswering)
    source = open_file(file, version_2_with_negative=False)
    train = SimpleNamespace(windows=WindowTable.from_columns({"question": [0, 1, 1, 2]}), source=source)
    task.inputs = SimpleNamespace(train=train)  # type: ignore[assignment]
    file.unlink()
    assert task.window_names(np.array([2, 0])) == ["number 2", "number 0"]
    train.windows = WindowTable.from_columns({"start_position": [0, 1, 1, 2]})  # as those of `bench`
    assert task.window_names(np.array([3])) == ["number 3"]
