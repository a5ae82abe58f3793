"""Steps with a NaN or infinite loss or gradient are skipped and recorded; too many end the training."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_world import make_world

from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.data.sources.squad import from_questions, open_file
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed import events
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_FAILURE
from hvd_bert.tasks.question_answering import QuestionAnswering, QuestionSet
from hvd_bert.training.health import LIMIT, LIMIT_LATER, LIMIT_SCALED, Health
from hvd_bert.training.meter import Meter

WINDOWS = 8


class Watched:
    """Meter and health checks on rank 0 of 2. `other`: rank 1's loss. In sums, rank 1 has rank 0's values."""

    def __init__(self, fp16: bool = False) -> None:
        self.world = make_world(size=2)
        self.other = 0.0
        self.world.allgather = lambda mine: [mine, self.other]  # type: ignore[method-assign]
        self.world.sum = lambda table: table[:1].expand_as(table)  # type: ignore[method-assign]
        self.meter = Meter(self.world)
        plan = BatchPlan(np.full(64, 20, np.int32), WINDOWS, accumulation=1, size=2, seed=0, crossover=4608)
        self.plan, self.step = plan, 0
        self.health = Health(self.meter, plan, self.world, 0, lambda ids: [f"w{n}" for n in ids], fp16)

    def train(self, loss: float, grad_norm: float = 1.0, other: float | None = None) -> None:
        self.meter.add(torch.tensor(loss), SimpleNamespace(num_windows=4, num_tokens=80, num_positions=80))
        self.meter.end_step(torch.tensor(grad_norm))  # also checks the previous step
        self.other = loss if other is None else other
        self.step += 1

    def read(self) -> dict[str, float]:
        self.meter.end_line(self.step)
        self.meter.settle()
        row = self.meter.read()
        self.health.check(self.step)
        return row


@pytest.fixture
def recorded(monkeypatch) -> list[dict[str, Any]]:
    """Collect recorded events, except warnings: whether they are recorded depends on earlier tests' logging."""
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


def test_skipped_step_is_a_warning_and_an_event_with_its_windows(recorded, caplog):
    run = Watched()
    run.train(2.0)
    run.train(1.0, math.nan, other=math.nan)
    run.train(4.0)
    row = run.read()
    assert "rank 1 is nan at step 2" in caplog.text
    (found,) = recorded
    names = [f"w{n}" for n in run.plan.rank_windows(1, 1)[0]]
    assert (found["step"], found["batch"]) == (2, [{"rank": 1, "loss": "nan", "windows": names}])
    assert row["loss"] == run.meter.results()["train_loss"] == 3.0  # the mean of the finite steps
    run.train(2.0, math.inf)  # the gradient is summed, so all ranks may be the cause
    run.meter.settle()
    assert [part["rank"] for part in recorded[1]["batch"]] == [0, 1]
    assert "The gradient is NaN or infinite at step 4" in caplog.text


# With fp16, a smaller loss scale cannot fix a NaN loss, so its limit is lower.
@pytest.mark.parametrize(
    ("fp16", "loss", "first", "later"), [(True, math.nan, LIMIT, LIMIT), (True, 1.0, LIMIT_SCALED, LIMIT_LATER)]
)
def test_training_ends_after_so_many_skipped_steps_in_a_row(fp16, loss, first, later, recorded):
    run, never = Watched(fp16), Watched(fp16)
    for limit in (first, later):  # a finite step restarts the count
        for _ in range(limit - 1):
            run.train(loss, math.nan)
        run.train(2.0)
    for watched, limit in ((run, later), (never, first)):
        for _ in range(limit):
            watched.train(loss, math.nan)
        with pytest.raises(CollectiveError, match=f" at step {watched.step}: .* last {limit} steps") as ended:
            watched.meter.settle()
        assert ended.value.status == EXIT_FAILURE and recorded[-1]["step"] == watched.step
        assert ("ranks 0, 1 is nan" in str(ended.value)) == math.isnan(loss)
        assert ("--learning_rate" in str(ended.value)) == (watched is run), "only after a finite step"


def test_infinite_loss_with_a_finite_gradient_ends_the_training(recorded):
    run = Watched()
    run.train(math.nan, math.nan)  # this step is skipped and training continues
    assert math.isnan(run.read()["loss"])
    run.train(math.inf)
    run.train(1.0)
    with pytest.raises(CollectiveError, match="The loss is inf at step 3, or since the last log line") as ended:
        run.read()
    assert ended.value.status == EXIT_FAILURE


def test_sums_without_skipped_steps_are_resumed(recorded):
    first, second = Watched(), Watched()
    first.train(2.0)
    first.read()
    first.train(math.nan, math.nan)
    first.train(4.0)
    since = first.meter.since_last_log()
    assert since[0] == 4.0
    second.meter.restore(first.meter.state(), since, 3)
    for run in (first, second):
        run.step = 3
        run.train(6.0)
        assert run.read()["loss"] == 5.0
        assert run.meter.results()["train_loss"] == 4.0


def test_windows_are_named_by_their_questions_or_numbered(make_questions, write_squad):
    questions, windows = make_questions(3), WindowTable.from_columns({"question": [0, 1, 1, 2]})
    gone = write_squad(questions)
    lost = open_file(gone, version_2_with_negative=False)
    gone.unlink()
    for source, names in ((from_questions("made", questions), ["q1", "q0"]), (lost, ["number 2", "number 0"])):
        task = QuestionAnswering.__new__(QuestionAnswering)
        task.train = QuestionSet(len, np.ones(4, np.int32), "", source=source, windows=windows)
        assert task.window_names(np.array([2, 0])) == names
