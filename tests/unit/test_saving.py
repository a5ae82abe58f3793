"""Checkpoints written during training (slow and failed writes), actions due after a step, and the saved state."""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from refusals import refused
from test_world import make_world
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_bert.checkpoint import files, resume
from hvd_bert.checkpoint.schedule import Best, due
from hvd_bert.config.command_line import parse
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.errors import EXIT_FAILURE, EXIT_STOPPED
from hvd_bert.training import saving, state
from hvd_bert.training.meter import Meter
from hvd_bert.training.optim import WeightAverage
from hvd_bert.training.saving import Checkpoints
from hvd_bert.training.state import TrainState, seed_ranks

FULL = OSError(28, "No space left on device")


class Strategy:
    """A strategy whose model and optimizer state are one tensor each."""

    def __init__(self) -> None:
        self.weight, self.moment = torch.zeros(2), torch.zeros(3)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
        return {"weight": self.weight}, {"weight/exp_avg": self.moment}, {"groups": []}


class Disk:
    """Replaces `files.write`: waits until `go` is set, then writes, or raises the next error in `errors`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.errors: list[Exception] = []
        self._write = files.write
        monkeypatch.setattr(files, "write", self.write)

    def write(self, folder: Path, step: int, contents: files.Contents) -> None:
        assert self.go.wait(30)
        if self.errors:
            raise self.errors.pop(0)
        self._write(folder, step, contents)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def run(tmp_path):
    """Return `make(*flags)`, which makes the Checkpoints of a small linear model without a training."""

    def describe(folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    def make(*flags: str) -> Checkpoints:
        config, world, model = parse(["--output_dir", str(tmp_path), *flags]), make_world(), torch.nn.Linear(3, 2)
        plan = BatchPlan(np.full(8, 20, np.int32), global_batch=2, accumulation=1, size=1, seed=0, crossover=4608)
        schedule = SimpleNamespace(state_dict=lambda: {"last_epoch": 0, "lr_lambdas": [None]})
        state: Any = TrainState(Strategy(), schedule, Meter(world), plan, world, Best("f1"))  # type: ignore[arg-type]
        task: Any = SimpleNamespace(model=model, save_description=describe)
        facts = {"identity": {}, "rank_batch": 2, "cpu_kernels": None}
        folder = Path(str(config.train.output_dir))
        return Checkpoints(state, task, folder, config.checkpoint, config.as_flat(), facts)

    return make


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.state.step = step
    checkpoints.save()


def saved_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "state.json").read_text())


def found(folder: Path) -> list[str]:
    return [path.name for path in files.candidates(folder)]


def test_slow_write_has_the_state_of_its_step(run, disk, tmp_path):
    checkpoints = run()
    state = checkpoints.state
    state.meter.energy_j, state.meter.joules = 5.0, lambda: 2.0
    disk.go.clear()
    save(checkpoints, 4)
    with torch.no_grad():  # training changes weights while the disk is slow
        state.strategy.weight.add_(1)
        state.strategy.moment.add_(1)
    state.best.update(4, {"f1": 50.0})
    state.step = 5
    disk.go.set()
    checkpoints.wait_for_write()
    assert checkpoints.totals["checkpoints"] == 1
    assert min(checkpoints.totals.values()) > 0
    assert checkpoints.metrics().keys() == checkpoints.totals.keys() - {"checkpoints"} and not checkpoints.metrics()
    written = files.read(tmp_path / "checkpoint-4")
    assert not written.tensors["model"]["weight"].any() and not written.tensors["optimizer"]["weight/exp_avg"].any()
    assert (written.state["step"], written.state["best"]["value"]) == (4, None)
    assert written.state["meter"]["energy_j"] == 7.0
    assert (tmp_path / "checkpoint-4" / "config.json").read_text() == "{}"


def test_failed_write_is_a_warning_and_the_next_write_succeeds(run, disk, tmp_path, caplog):
    checkpoints = run()
    disk.errors = [FULL, FULL]
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        save(checkpoints, 1)
        while not caplog.messages:  # the failure is reported at a later step
            checkpoints.check_write()
        save(checkpoints, 2)
        save(checkpoints, 3)  # or the failure is reported at the next save
    assert [("could not be written" in text, "No space left" in text) for text in caplog.messages] == 2 * [(True, True)]
    checkpoints.wait_for_write()
    assert found(tmp_path) == ["checkpoint-3"]


@pytest.mark.parametrize("error", [FULL, MemoryError("no memory")])
def test_failed_write_at_a_stop_is_a_failure(run, disk, error):
    checkpoints = run()
    disk.errors = [error]
    checkpoints.state.step = 1
    with pytest.raises(CollectiveError, match=r"checkpoint of step 1 .*no ") as failed:
        checkpoints.save_and_stop("SIGTERM to rank 0")
    assert failed.value.status == EXIT_FAILURE


def test_stop_reports_how_to_resume(run, tmp_path):
    checkpoints = run("--overwrite_output_dir", "--save_only_model")
    checkpoints.state.step = 7
    named = ("step 7", "Ctrl-C", tmp_path / "checkpoint-7", "without --overwrite_output_dir")
    with refused(*named, error=CollectiveError) as stopped:
        checkpoints.save_and_stop("Ctrl-C")
    assert stopped.value.status == EXIT_STOPPED
    assert "model_only" not in saved_state(tmp_path / "checkpoint-7")
    assert found(tmp_path) == ["checkpoint-7"]


@pytest.mark.parametrize(
    ("steps", "reason", "asked"), [(7, "SIGUSR1", ["step 7"]), (0, "SIGUSR1", [""]), (7, "Ctrl-C", [])]
)
def test_stop_requeues(run, monkeypatch, steps, reason, asked):
    progress: list[str] = []
    monkeypatch.setattr(saving.slurm, "requeue", lambda environ, mode, done, announce: progress.append(done))
    checkpoints = run()
    checkpoints.state.step = steps
    with pytest.raises(CollectiveError) as stopped:
        checkpoints.save_and_stop(reason)
    assert progress == asked and ("rerun" in str(stopped.value)) == (not asked)


def test_stop_saves_in_a_new_folder_if_it_was_removed(run, tmp_path):
    folder = tmp_path / "a" / "out"
    checkpoints = run("--output_dir", str(folder))
    folder.mkdir(parents=True)
    written: list[tuple[int, str]] = []
    checkpoints.on_save = lambda step, folder: written.append((step, folder.name))
    save(checkpoints, 7)
    assert checkpoints._running and checkpoints._running.result()[1] is None  # written, but on_save is not yet called
    assert not checkpoints.is_output_dir_missing()
    shutil.rmtree(folder)
    assert checkpoints.is_output_dir_missing() and checkpoints.output_dir_missing
    with pytest.raises(CollectiveError) as stopped:
        checkpoints.save_and_stop("a removal")
    assert stopped.value.status == EXIT_STOPPED and written == [(7, "checkpoint-7")] * 2
    assert saved_state(folder / "checkpoint-7")["step"] == 7 and resume.unfinished(folder)
    shutil.rmtree(folder.parent)  # as if the file system were unmounted
    with pytest.raises(CollectiveError, match="No such file") as failed:
        checkpoints.save_and_stop("a removal")
    assert failed.value.status == EXIT_FAILURE and not folder.parent.exists()


def test_diverged_state_replaces_no_good_checkpoint(run, tmp_path, caplog):
    checkpoints = run("--save_total_limit", "1")
    save(checkpoints, 1)
    batch: Any = SimpleNamespace(num_windows=1, num_tokens=1, num_positions=1)
    checkpoints.state.meter.add(torch.tensor(float("nan")), batch)
    checkpoints.state.meter.end_step(torch.tensor(1.0))
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        save(checkpoints, 2)
    with pytest.raises(CollectiveError, match="NaN or infinite at step 2") as diverged:
        checkpoints.save_and_stop("SIGTERM to rank 0")
    assert diverged.value.status == EXIT_FAILURE
    assert "No checkpoint is saved at step 2" in caplog.text and found(tmp_path) == ["checkpoint-1"]
    assert checkpoints.totals["checkpoints"] == 1


EACH = [*range(1, 13)]


@pytest.mark.parametrize(
    ("flags", "given", "log", "evaluate", "save", "ends"),
    [
        ("", {}, [1, 4, 8, 10, 12], [4, 8], [12], [12]),  # the final evaluation is separate
        ("", {"evaluates": False}, [1, 10, 12], [], [12], [12]),
        ("--eval_strategy no --save_steps 0", {}, [1, 10, 12], [], [], [12]),
        ("--eval_steps 5 --eval_strategy no", {}, [1, 10, 12], [], [12], [12]),  # run_qa does the same
        # --eval_steps overrides the preset's eval_strategy, which is no.
        ("--eval_steps 5 --config sample_v2", {}, [1, 5, 10, 12], [5, 10], [12], [12]),
        ("--eval_strategy steps --logging_steps 5", {}, [1, 5, 10, 12], [5, 10], [12], [12]),
        ("--load_best_model_at_end --save_steps 5", {}, [1, 4, 8, 10, 12], [4, 8, 12], [5, 10, 12], [12]),
        ("--early_stopping_patience 2", {"since": 1}, [1, 4, 8, 10, 12], [4, 8], [12], [12]),
        ("--early_stopping_patience 2", {"since": 2}, EACH, [4, 8], EACH, EACH),
    ],
)
def test_actions_due(flags, given, log, evaluate, save, ends):
    """Compare the actions due after each of 12 steps, in epochs of four steps."""
    found = [due(step, 12, 4, parse(flags.split()), **given) for step in EACH]
    steps = {name: [step for step in EACH if getattr(found[step - 1], name)] for name in vars(found[0])}
    assert steps == {"log": log, "evaluate": evaluate, "save": save, "ends": ends}


def draw() -> list[float]:
    gauss = [random.gauss(0, 1), float(np.random.standard_normal())]  # both generators cache a second number
    return [*gauss, random.random(), float(np.random.rand()), *torch.rand(3).tolist(), *torch.randn(5).tolist()]


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 3, 700])
def test_random_numbers_continue(drawn_before):
    seed_ranks(5, 0, make_world())
    for _ in range(drawn_before):
        draw()
    saved = safetensors.torch.load(safetensors.torch.save(state.random_numbers([])))  # as a checkpoint stores them
    expected = [draw() for _ in range(3)]
    seed_ranks(6, 0, make_world())
    state.set_random_numbers(saved, [])
    assert [draw() for _ in range(3)] == expected


def test_seeds_ranks_and_steps_draw_differently():
    drawn = []
    for seed, rank, step in itertools.product(range(3), range(3), (0, 1, 9)):
        seed_ranks(seed, step, make_world(rank, 3))
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [27, 27, 27]
    seed_ranks(42, 0, make_world(1, 2))  # pinned: equal in all versions
    drawn = [random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()]
    assert drawn == [0.20326353038941192, 0.3458528196027807, 0.8636737013983086]


def test_random_numbers_of_all_gpus_of_a_rank_are_restored(monkeypatch):
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    states = {first: torch.tensor([1]), second: torch.tensor([2])}
    restored: dict[torch.device, torch.Tensor] = {}
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda numbers, gpu: restored.update({gpu: numbers}))
    saved = state.random_numbers(list(states))
    state.set_random_numbers(saved, list(states))
    assert restored == states
    del saved["cuda1"], restored[second]  # a checkpoint without cuda:1
    state.set_random_numbers(saved, list(states))
    assert restored.keys() == {first}


@pytest.mark.parametrize(
    ("metric", "values", "best", "since"),
    [
        ("f1", [10.0, 30.0, 20.0, 30.0], (30.0, 2), 2),
        ("eval_loss", [3.0, 1.0, 2.0, 1.0], (1.0, 2), 2),
        ("exact_match", [math.nan, 5.0, math.nan], (5.0, 2), 1),
        ("eval_loss", [math.nan], (None, 0), 1),
    ],
)
def test_best(metric, values, best, since):
    found = Best(metric, "min" if metric == "eval_loss" else "max")
    gains = [found.update(step, {metric: value}) for step, value in enumerate(values, 1)]
    assert (found.value, found.step, found.since) == (*best, since)
    assert gains.count(True) == (2 if len(values) == 4 else int(best[1] > 0))


def test_average_excludes_skipped_steps():
    model = torch.nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average, start = WeightAverage(model, 0.75), model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
        average.update(torch.tensor(math.nan))  # a skipped step
        with average.applied():
            assert torch.equal(model.weight, start)
        average.update(torch.tensor(2.0))
        with average.applied():
            torch.testing.assert_close(model.weight, start + 0.25)
    assert torch.equal(model.weight, start + 1)


class Launches(TorchDispatchMode):
    """Counts the kernels that a GPU would launch: none for a view, else one per operation.

    An operation on lists launches a kernel per tensor if tensors at the same index differ in shape, stride or dtype.
    """

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lists = [item for item in args if isinstance(item, (list, tuple)) and item]
        alike = all(len({(t.shape, t.stride(), t.dtype) for t in row}) == 1 for row in zip(*lists, strict=True))
        self.total += 0 if function.is_view else 1 if alike else len(lists[0])
        return function(*args, **(kwargs or {}))


def test_average_needs_few_kernels():
    model = torch.nn.Sequential(*(torch.nn.Linear(size, 2) for size in range(1, 101)))
    average = WeightAverage(model, 0.999)
    with Launches() as launches:
        average.update(torch.tensor(2.0))
    assert launches.total <= 20
