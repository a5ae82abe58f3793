"""Checkpoints during training: a checkpoint has the state of its step, however long the write takes."""

from __future__ import annotations

import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_world import make_world

from hvd_bert.checkpoint import files, saving
from hvd_bert.checkpoint.saving import Checkpoints, Writer
from hvd_bert.config.command_line import parse
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError, HostsChanged
from hvd_bert.errors import EXIT_FAILURE, EXIT_STOPPED
from hvd_bert.training.meter import Meter
from hvd_bert.training.state import Best, TrainState


class Strategy:
    """Weights and AdamW's state, one tensor each."""

    def __init__(self) -> None:
        self.weight, self.moment = torch.zeros(2), torch.zeros(3)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
        return {"weight": self.weight}, {"weight/exp_avg": self.moment}, {"groups": []}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*flags) -> Checkpoints of a model with one matrix, without the rest of a training."""
    monkeypatch.setattr(saving, "identity", lambda config, task: {"of": "a test"})
    monkeypatch.setattr(saving, "model_files", lambda task: {"config.json": b"{}"})

    def make(*flags: str) -> Checkpoints:
        config = parse(["--output_dir", str(tmp_path), *flags])
        world = make_world()
        plan = BatchPlan(np.full(8, 20, np.int32), global_batch=2, accumulation=1, size=1, seed=0, crossover=4608)
        schedule = SimpleNamespace(state_dict=lambda: {"last_epoch": 0, "lr_lambdas": [None]})
        state = TrainState(Strategy(), schedule, Meter(world), plan, world, Best("f1"))  # type: ignore[arg-type]
        return Checkpoints(state, config, SimpleNamespace())  # type: ignore[arg-type]

    return make


def state_of(folder) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def test_slow_write_holds_what_was_there(run, tmp_path, monkeypatch):
    checkpoints = run()
    state, go = checkpoints.state, threading.Event()
    whole = files.write

    def slow(*arguments):
        assert go.wait(30)
        return whole(*arguments)

    monkeypatch.setattr(files, "write", slow)
    state.step = 4
    before = state.strategy.weight.clone()
    checkpoints.save()
    with torch.no_grad():  # training continues
        state.strategy.weight.add_(1)
        state.strategy.moment.add_(1)
    checkpoints.evaluated({"f1": 50.0})
    state.step = 5
    go.set()
    checkpoints.finish()
    found = files.read(tmp_path / "checkpoint-4")
    assert torch.equal(found.tensors["model"]["weight"], before)
    assert not found.tensors["optimizer"]["weight/exp_avg"].any()
    assert (found.documents["state"]["step"], found.documents["state"]["best"]["value"]) == (4, None)


def test_no_step_counts_before_the_write_of_the_last_save(run, monkeypatch):
    checkpoints, go, whole, order = run(), threading.Event(), files.write, []
    monkeypatch.setattr(files, "write", lambda *arguments: (go.wait(30), whole(*arguments), order.append("written")))
    checkpoints.state.step = 4
    checkpoints.save()
    waiting = threading.Thread(target=lambda: (checkpoints.await_write(), order.append("next step")))
    waiting.start()
    go.set()
    waiting.join(30)
    assert order == ["written", "next step"]
    counted = {"checkpoint_pause_s", "checkpoint_write_s", "checkpoint_overlap_s"}
    assert set(checkpoints.metrics()) == counted and not checkpoints.metrics()


def test_waiting_for_a_write_does_not_count_as_overlap(run, monkeypatch):
    """Training waits for the end of the first write, and for the whole last one."""
    checkpoints, whole, wait = run(), files.write, Writer.wait
    clock, began, waited_for = SimpleNamespace(now=0.0), threading.Event(), threading.Event()

    def write(*arguments):
        began.set()
        assert waited_for.wait(30)
        clock.now += 3
        return whole(*arguments)

    monkeypatch.setattr(saving, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(files, "write", write)
    monkeypatch.setattr(Writer, "wait", lambda writer: (waited_for.set(), wait(writer))[1])
    for step, seconds in ((4, 7), (8, 0)):
        waited_for.clear()
        began.clear()
        checkpoints.state.step = step
        checkpoints.save()
        assert began.wait(30)
        clock.now += seconds  # of training
        if step == 4:
            checkpoints.await_write()
            checkpoints.await_write()  # nothing to wait for
    counted = {"checkpoint_pause_s": 3, "checkpoint_write_s": 10, "checkpoint_overlap_s": 7}
    assert checkpoints.metrics() == counted
    for _ in range(2):
        checkpoints.finish()
    counted = {"checkpoint_pause_s": 6, "checkpoint_write_s": 13, "checkpoint_overlap_s": 7}
    assert checkpoints.totals == {"checkpoints": 2} | counted


def test_failed_write_is_a_warning_and_the_next_one_succeeds(run, tmp_path, monkeypatch, caplog):
    checkpoints = run()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        checkpoints.state.step = 1
        checkpoints.save()
        with caplog.at_level(logging.WARNING, "hvd_bert"):
            checkpoints.await_write()
    checkpoints.state.step = 2
    checkpoints.save()
    assert "could not be written" in caplog.text and "No space left on device" in caplog.text
    checkpoints.finish()
    assert [path.name for path in files.candidates(tmp_path)] == ["checkpoint-2"]


def test_no_space_for_the_small_files_is_a_failed_write(run, monkeypatch, caplog):
    checkpoints = run()
    monkeypatch.setattr(saving, "model_files", lambda task: (_ for _ in ()).throw(OSError(28, "No space left")))
    checkpoints.state.step = 1
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        checkpoints.save()
        checkpoints.await_write()
    assert "could not be written" in caplog.text and "Training continues" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("no memory")], ids=repr)
def test_failed_last_write_is_no_stop(run, monkeypatch, error):
    checkpoints = run()
    monkeypatch.setattr(files, "write", lambda *_: (_ for _ in ()).throw(error))
    checkpoints.state.step = 1
    with pytest.raises(CollectiveError, match=r"checkpoint of step 1 could not be written: .*no ") as failed:
        checkpoints.stop("SIGTERM to rank 0")
    assert failed.value.status == 1


def test_stop_reports_how_to_resume(run, tmp_path):
    checkpoints = run("--overwrite_output_dir", "--save_only_model")
    checkpoints.state.step = 7
    with pytest.raises(
        CollectiveError, match=r"after step 7 by SIGINT to rank 0.*without --overwrite_output_dir"
    ) as stopped:
        checkpoints.stop("SIGINT to rank 0")
    assert stopped.value.status == EXIT_STOPPED
    assert "model_only" not in state_of(tmp_path / "checkpoint-7")
    with pytest.raises(HostsChanged):
        checkpoints.stop(None)


def test_diverged_state_replaces_no_good_one(run, tmp_path, caplog):
    checkpoints = run("--save_total_limit", "1")
    checkpoints.state.step = 1
    checkpoints.save()
    checkpoints.state.meter._loss.fill_(float("nan"))
    checkpoints.state.step = 2
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        checkpoints.save()
    with pytest.raises(CollectiveError, match="NaN or infinite at step 2: training has diverged") as diverged:
        checkpoints.stop("SIGTERM to rank 0")
    assert diverged.value.status == EXIT_FAILURE
    assert "No checkpoint is saved at step 2: the loss is NaN or infinite" in caplog.text
    assert [path.name for path in files.candidates(tmp_path)] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [(["--save_steps", "4"], [4, 8, 10]), (["--save_steps", "0"], []), (["--save_steps", "20"], [10])],
    ids=str,
)
def test_when_a_checkpoint_is_due(run, flags, steps):
    checkpoints = run(*flags)
    due = []
    for step in range(1, 11):
        checkpoints.state.step = step
        due += [step] * checkpoints.due(10)
    assert due == steps


def test_early_end_is_saved(run):
    checkpoints = run("--early_stopping_patience", "2")
    for step, f1 in ((1, 50.0), (2, 40.0), (3, 50.0)):
        checkpoints.state.step = step
        checkpoints.evaluated({"f1": f1})
    assert checkpoints.patience_is_over
    assert checkpoints.due(10)
