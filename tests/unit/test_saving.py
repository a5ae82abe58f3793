"""Checkpoints during training: a checkpoint has the state of its step, however long the write takes."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from concurrent.futures import wait
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_world import make_world

from hvd_bert.checkpoint import files, resume
from hvd_bert.config.command_line import parse
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError, HostsChanged
from hvd_bert.errors import EXIT_FAILURE, EXIT_STOPPED
from hvd_bert.train import saving
from hvd_bert.train.meter import Meter
from hvd_bert.train.saving import Checkpoints
from hvd_bert.train.state import Best, TrainState


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


def test_a_training_that_fails_finishes_its_write(run, tmp_path, monkeypatch):
    checkpoints, whole, began = run(), files.write, threading.Event()
    closes = threading.Event()
    shutdown = checkpoints._writer.shutdown

    def slow(*arguments):
        began.set()
        assert closes.wait(30)
        return whole(*arguments)

    monkeypatch.setattr(files, "write", slow)
    monkeypatch.setattr(checkpoints._writer, "shutdown", lambda **options: (closes.set(), shutdown(**options)))
    with pytest.raises(CollectiveError), closing(checkpoints):
        checkpoints.state.step = 4
        checkpoints.save()
        assert began.wait(30)
        raise CollectiveError("The loss is nan at step 5.")
    assert state_of(tmp_path / "checkpoint-4")["step"] == 4  # before the launcher ends this rank


@pytest.fixture
def waited_for(monkeypatch) -> threading.Event:
    """Set while training waits for a write."""
    waits, end = threading.Event(), Checkpoints._end_of_write

    def telling(checkpoints: Checkpoints, **options: bool) -> Exception | None:
        waits.set()
        try:
            return end(checkpoints, **options)
        finally:
            waits.clear()

    monkeypatch.setattr(Checkpoints, "_end_of_write", telling)
    return waits


def test_steps_overlap_with_the_write_and_the_next_save_waits_for_it(run, waited_for, monkeypatch):
    checkpoints, whole, order = run(), files.write, []
    snapshot = checkpoints.state.snapshot

    def slow(folder, step, contents):
        assert waited_for.wait(30)
        whole(folder, step, contents)
        order.append(f"written {step}")

    monkeypatch.setattr(files, "write", slow)
    monkeypatch.setattr(checkpoints.state, "snapshot", lambda: (order.append("copied"), snapshot())[1])
    for step in range(4, 9):
        checkpoints.state.step = step
        checkpoints.check_write()
        order.append(f"step {step}")
        if step % 4 == 0:
            checkpoints.save()
    checkpoints.finish()
    steps = [f"step {step}" for step in range(5, 9)]
    assert order == ["step 4", "copied", *steps, "written 4", "copied", "written 8"]
    counted = {"checkpoint_pause_s", "checkpoint_copy_s", "checkpoint_write_s", "checkpoint_overlap_s"}
    assert set(checkpoints.metrics()) == counted and not checkpoints.metrics()


def test_waiting_for_a_write_does_not_count_as_overlap(run, waited_for, monkeypatch):
    """Training waits for the end of the first write, and for the whole last one."""
    checkpoints, whole = run(), files.write
    clock, began = SimpleNamespace(now=0.0), threading.Event()
    snapshot = checkpoints.state.snapshot

    def write(*arguments):
        began.set()
        assert waited_for.wait(30)
        clock.now += 3
        return whole(*arguments)

    def copy():
        clock.now += 1
        return snapshot()

    monkeypatch.setattr(saving, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(files, "write", write)
    monkeypatch.setattr(checkpoints.state, "snapshot", copy)
    for step, seconds in ((4, 7), (8, 0)):
        began.clear()
        checkpoints.state.step = step
        checkpoints.save()
        assert began.wait(30)
        clock.now += seconds  # of training
    counted = {"checkpoint_pause_s": 5, "checkpoint_copy_s": 2, "checkpoint_write_s": 10, "checkpoint_overlap_s": 7}
    assert checkpoints.metrics() == counted
    for _ in range(2):
        checkpoints.finish()
    counted |= {"checkpoint_pause_s": 8, "checkpoint_write_s": 13}
    assert checkpoints.totals == {"checkpoints": 2} | counted


@pytest.mark.parametrize("at_next_step", [True, False])
def test_failed_write_is_a_warning_and_the_next_one_succeeds(run, tmp_path, monkeypatch, caplog, at_next_step):
    checkpoints = run()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        checkpoints.state.step = 1
        checkpoints.save()
        wait([checkpoints._running])
    checkpoints.state.step = 2
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        if at_next_step:
            checkpoints.check_write()
            assert "could not be written" in caplog.text
        checkpoints.save()
    assert caplog.text.count("could not be written") == 1 and "No space left on device" in caplog.text
    checkpoints.finish()
    assert [path.name for path in files.candidates(tmp_path)] == ["checkpoint-2"]


def test_no_space_for_the_small_files_is_a_failed_write(run, monkeypatch, caplog):
    checkpoints = run()
    monkeypatch.setattr(saving, "model_files", lambda task: (_ for _ in ()).throw(OSError(28, "No space left")))
    checkpoints.state.step = 1
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        checkpoints.save()
        wait([checkpoints._running])
        checkpoints.check_write()
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


def test_stop_saves_in_a_new_folder_if_it_was_removed(run, tmp_path, caplog):
    checkpoints, folder = run(), tmp_path / "a" / "out"
    checkpoints._config.train.output_dir = str(folder)
    folder.mkdir(parents=True)
    checkpoints.state.step = 7
    checkpoints.save()
    checkpoints.finish()
    assert not checkpoints.look_for_folder()
    shutil.rmtree(folder)
    assert checkpoints.look_for_folder() and checkpoints.folder_is_lost
    with pytest.raises(CollectiveError) as stopped:
        checkpoints.stop("a removal")
    assert stopped.value.status == EXIT_STOPPED
    assert state_of(folder / "checkpoint-7")["step"] == 7 and resume.unfinished(folder)
    shutil.rmtree(folder.parent)  # such as a file system that is gone: nothing is written in its place
    with pytest.raises(CollectiveError, match=r"could not be written: .*No such file") as failed:
        checkpoints.stop("a removal")
    assert failed.value.status == EXIT_FAILURE and not folder.parent.exists()


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
