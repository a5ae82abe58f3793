"""A refused run changes nothing, earlier files stay until training starts, and a full disk is only a warning."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import resuming
import torch
from refusals import refused
from safetensors.torch import load_file, save_file
from test_metrics_log import SCORES, metrics, rows
from test_output_dir import recording
from test_world import make_world

from hvd_bert.checkpoint import files
from hvd_bert.config.command_line import override_argv, parse
from hvd_bert.config.settings import from_values
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.distributed.world import CollectiveError, World
from hvd_bert.monitoring import recording as recording_module
from hvd_bert.output import metrics_log, run_folder
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.output.reporters import tensorboard
from hvd_bert.output.reporters.base import open_reporters
from hvd_bert.storage.writing import JsonLines
from hvd_bert.strategies.base import Strategy
from hvd_bert.training import loop, start

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def base(tmp_path, tokenizer, make_questions, write_squad) -> list[str]:
    """Return the flags of a short training: three steps and an evaluation."""
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": len(tokenizer), **SHAPE}))
    file = str(write_squad(make_questions(6)))
    flags = ["--config_name", str(model), "--train_file", file, "--validation_file", file, "--max_seq_length", "64"]
    flags += ["--doc_stride", "8", "--max_steps", "3", "--strategy", "none", "--num_threads", "1"]
    return [*flags, "--per_device_train_batch_size", "6"]


@pytest.fixture(autouse=True)
def process_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(start, "set_up", lambda config, world: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def world_of_one() -> World:
    world = make_world()
    world.set_up_device()
    return world


def train(base: list[str], *flags: str) -> None:
    world = world_of_one()
    try:
        loop.run(parse(override_argv(base, flags)), world)
    finally:
        world.leave()  # as `runner` does: otherwise a referenced exception would keep the folder's lock


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_refused_training_keeps_the_earlier_run(base, tmp_path, monkeypatch):
    out = tmp_path / "out"
    train(base, "--output_dir", str(out))
    before = content(out)
    assert set(os.listdir(out)) >= {"train_results.json", "eval_results.json", "checkpoint-3", "config.json", "tb"}
    horovod = ["--strategy", "horovod", "--timeline_file", str(tmp_path / "timeline.json")]
    refusals = {
        "this run has only 3 steps": ["--profile", "--timeline_steps", "11:30"],
        "a single rank sends no gradients": [*horovod, "--timeline_steps", "1:2"],
    }
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(BatchPlan, "rank_windows", no_memory)
        train(base, "--output_dir", str(out), "--overwrite_output_dir")
    assert content(out) == before
    monkeypatch.setattr(start, "strategy_class", lambda name: None)
    monkeypatch.setattr("hvd_bert.training.state.strategy_class", lambda name: Strategy)
    for words, flags in refusals.items():
        with pytest.raises(CollectiveError, match=words):
            train(base, "--output_dir", str(out), "--overwrite_output_dir", *flags)
        assert content(out) == before
        with pytest.raises(CollectiveError, match=words):
            train(base, "--output_dir", str(tmp_path / "new"), *flags)
        assert not (tmp_path / "new").exists() and not (tmp_path / "timeline.json").exists()
    train(base, "--output_dir", str(out), "--overwrite_output_dir", "--max_steps", "2", "--no_do_eval")
    assert {"checkpoint-2"} == {path.name for path in out.glob("checkpoint-*")}
    assert not list(out.glob("eval_*.json")) and (out / "train_results.json").exists()


def test_a_wrong_checkpoint_is_refused_before_the_data_are_read(base, tmp_path):
    with refused(f"--resume_from_checkpoint {tmp_path}", error=CollectiveError):
        train(base, "--train_file", "missing.json", "--resume_from_checkpoint", str(tmp_path))


@pytest.mark.parametrize("long", [False, True])
def test_a_run_ends_with_its_scores_and_its_folder(base, tmp_path, monkeypatch, caplog, long):
    monkeypatch.setattr(loop, "LONG_S", 0.0 if long else loop.LONG_S)
    out = tmp_path / "a run"
    with caplog.at_level(logging.INFO, "hvd_bert"):
        train(base, "--output_dir", str(out))
    scores, where = caplog.messages[-2:]
    assert scores.startswith("EM " if long else "step 3/3: EM ") and "\n" not in scores
    assert where == f"The output is in {out}. To show it: hvd-bert report '{out}'"
    assert any(text.startswith("Step time by phase") for text in caplog.messages) == long


def test_the_first_step_after_a_resume_is_shown_but_not_recorded(base, tmp_path, caplog):
    base = [*base, "--max_steps", "4", "--save_steps", "1", "--save_total_limit", "9"]
    base += ["--logging_steps", "3", "--eval_strategy", "no"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(base, "--output_dir", str(whole))
    caplog.clear()
    with caplog.at_level(logging.INFO, "hvd_bert"):
        train(base, "--output_dir", str(resumed), "--resume_from_checkpoint", str(whole / "checkpoint-1"))
    assert [text.split()[1] for text in caplog.messages if text.startswith("step ")] == ["2/4", "4/4", "4/4:"]
    assert resuming.rows(resumed) == [row for row in resuming.rows(whole) if row["step"] > 1]


def test_signals_after_the_last_step_do_not_lose_the_model(base, tmp_path, monkeypatch):
    out, save, evaluate = tmp_path / "out", run_folder.save_model, loop.Evaluations.evaluate

    def signalled(do: Callable[..., Any]) -> Callable[..., Any]:
        def action(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return do(*arguments)

        return action

    monkeypatch.setattr(run_folder, "save_model", signalled(save))
    monkeypatch.setattr(loop.Evaluations, "evaluate", signalled(evaluate))  # as a launcher that repeats the signal
    train(base, "--output_dir", str(out), "--eval_strategy", "no")
    assert {"model.safetensors", "train_results.json", "eval_results.json"} <= {path.name for path in out.iterdir()}


def test_best_model_is_loaded_from_the_folder_that_was_resumed_from(base, tmp_path):
    best = ("--load_best_model_at_end", "--metric_for_best_model", "eval_loss", "--eval_steps", "1")
    base = [*base, *best, "--learning_rate", "10", "--save_steps", "1", "--save_total_limit", "9"]
    whole, resumed, again = (tmp_path / name for name in ("whole", "resumed", "again"))
    train(base, "--output_dir", str(whole))
    for folder, checkpoint in ((resumed, whole / "checkpoint-1"), (again, resumed / "checkpoint-2")):
        train(base, "--output_dir", str(folder), "--resume_from_checkpoint", str(checkpoint))
        recorded = json.loads((folder / "train_results.json").read_text())["best"]
        assert (recorded["step"], recorded["folder"]) == (1, str(whole))
        assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def no_memory(plan, step, rank):
    raise MemoryError


LEARNS = ("--learning_rate", "1e-2", "--warmup_ratio", "0", "--metric_for_best_model", "eval_loss")


@pytest.mark.parametrize("flags", [("--eval_steps", "2"), ("--save_steps", "0")], ids=str)
def test_best_score_includes_the_final_evaluation(base, tmp_path, monkeypatch, flags):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(base, *LEARNS, *flags, "--output_dir", str(whole))
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    best = min((row for row in rows if "eval_loss" in row), key=lambda row: row["eval_loss"])
    expected = {"metric": "eval_loss", "value": best["eval_loss"], "step": 3, "since": 0}
    assert best["step"] == 3 and json.loads((whole / "train_results.json").read_text())["best"] == expected
    if "--save_steps" in flags:
        return
    checkpoint = whole / "checkpoint-3"
    files.verify(checkpoint)
    assert json.loads((checkpoint / "state.json").read_text())["eval_pending"] is True
    assert set(os.listdir(whole)) <= {*run_folder.RUN_FILES, *(f"checkpoint-{step}" for step in (1, 2, 3)), ".lock"}
    evaluate = loop.Evaluations.evaluate

    def fails_once_saved(*arguments: Any) -> Any:
        if (killed / "model.safetensors").exists():
            raise MemoryError
        return evaluate(*arguments)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(loop.Evaluations, "evaluate", fails_once_saved)
        train(base, *LEARNS, *flags, "--output_dir", str(killed))
    train(base, *LEARNS, *flags, "--output_dir", str(killed))
    assert resuming.differences(whole, killed) == []


def test_failed_evaluation_keeps_the_earlier_evaluation(base, tmp_path):
    out, model = tmp_path / "out", tmp_path / "trained"
    train(base, "--output_dir", str(model), "--no_do_eval")
    evaluate = [*base[2:], "--no_do_train", "--model_name_or_path", str(model)]
    train(evaluate, "--output_dir", str(out))
    before = content(out)
    weights = load_file(model / "model.safetensors")
    save_file({name: value * float("nan") for name, value in weights.items()}, model / "model.safetensors")
    for folder in (out, tmp_path / "new"):
        with pytest.raises(CollectiveError, match="NaN"):
            train(evaluate, "--output_dir", str(folder))
    assert content(out) == before and not (tmp_path / "new").exists()


def test_decisions_of_the_start_are_recorded_and_do_not_change_the_settings(base: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = override_argv(base, ["--per_device_train_batch_size", "auto", "--output_dir", str(out)])
    config, unchanged = parse(words), parse(words)
    loop.run(config, world_of_one())
    assert config == unchanged
    events = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    begun = next(event for event in events if event["event"] == "start")  # after warnings about the data
    recorded = parse(["--config", str(out / "train_config.yaml")])
    batch = recorded.train.per_device_train_batch_size
    expected = {"output_dir": str(out), "metric_for_best_model": "f1"}
    assert begun["decided"] == expected | {"per_device_train_batch_size": batch} and batch > 1
    assert recorded == from_values(config.as_flat() | begun["decided"])


def test_the_optimizer_is_freed_before_the_final_evaluation(base, tmp_path, monkeypatch):
    optimizers, alive, evaluate = [], [], loop.Evaluations.evaluate

    class Noted(Strategy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            optimizers.append(weakref.ref(self.optimizer))

    def evaluated(*args: Any) -> Any:
        gc.collect()
        alive.append(optimizers[-1]() is not None)
        return evaluate(*args)

    monkeypatch.setattr("hvd_bert.training.state.strategy_class", lambda name: Noted)
    monkeypatch.setattr(loop.Evaluations, "evaluate", evaluated)
    train(base, "--output_dir", str(tmp_path / "out"), "--eval_strategy", "steps", "--eval_steps", "2")
    assert alive == [True, False]


FULL = Path("/dev/full")


def raising(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("module", "opener"), [(metrics_log, "JsonLines"), (tensorboard, "RecordWriter"), (loop, "GpuUsage")]
)
def test_files_that_cannot_be_opened_end_the_run_before_training(base, tmp_path, monkeypatch, module, opener):
    monkeypatch.setattr(module, opener, raising(errno.EROFS))
    with pytest.raises(CollectiveError) as failed:
        train(base, "--output_dir", str(tmp_path / "out"))
    assert f"--output_dir {tmp_path / 'out'}" in str(failed.value) and "Read-only" in str(failed.value)
    assert failed.value.status == 2


@pytest.mark.parametrize("lost", ["space", "folder"])
def test_metrics_that_cannot_be_written_are_a_warning_per_file(tmp_path, caplog, lost):
    (reporter,) = open_reporters(["tensorboard"], tmp_path)
    metrics_logger = MetricsLogger(tmp_path, enabled=True, reporters=[reporter])
    if lost == "folder":
        shutil.rmtree(tmp_path)
    for descriptor in (metrics_logger.jsonl._file, reporter._writer._writer.fileno()) if lost == "space" else ():
        os.dup2(os.open(FULL, os.O_WRONLY), descriptor)  # their code refuses to open a device
    assert not [thread for thread in threading.enumerate() if "EventLogger" in type(thread).__name__]
    metrics_logger.begin(3, step=0, steps_per_epoch=3)
    with caplog.at_level(logging.WARNING, "hvd_bert"):
        for step in (1, 2):
            metrics_logger.logged(step, metrics(step))
        metrics_logger.evaluated(SCORES, "f1 60", 2)
        metrics_logger.close()
    named = {"space": ["TensorBoard", "metrics.jsonl"], "folder": []}[lost]
    assert [name for name in ("TensorBoard", "metrics.jsonl") for text in caplog.messages if name in text] == named
    assert all("No space left on device" in text for text in caplog.messages)


@contextmanager
def full_disk() -> Iterator[None]:
    """Context manager: os.write writes five bytes, then fails as on a full disk."""
    write, space = os.write, [5]

    def limited(descriptor: int, content: bytes) -> int:
        if not space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[: space.pop()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", limited)
        yield


def test_lines_are_written_once_there_is_space(tmp_path, caplog):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    values = [{"step": step, "text": "x" * 400} for step in range(100)]
    with full_disk(), caplog.at_level(logging.WARNING, "hvd_bert"):
        for value in values:
            lines.write(value)
    assert len(caplog.messages) == 1
    lines.write({"step": 100})
    assert rows(tmp_path) == [*values, {"step": 100}]
    with full_disk():
        lines.write({"step": 101})
    lines.close()
    assert rows(tmp_path)[101:] == [{"step": 101}]


def test_timeline_that_cannot_be_recorded_is_a_warning(tmp_path, monkeypatch, caplog):
    recorded = recording(tmp_path / "new" / "t.json")
    monkeypatch.setattr(recording_module, "make_folder", raising(errno.ENOSPC))
    recorded.world.start_timeline = recorded.world.stop_timeline = lambda *_: None  # avoids Horovod's own log line
    with caplog.at_level(logging.INFO, "hvd_bert"):
        for step in (1, 2, 3):
            recorded.before(step)
            recorded.after(step, tmp_path)
        recorded.close()
    assert len(caplog.messages) == 1 and f"{tmp_path / 'new' / 't.json'}" in caplog.text


class LogsLate(loop.Training):
    """A training that logs each step one step late, as on a GPU."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.logs_late = True


@pytest.mark.parametrize("every", ["1", "3"])
def test_lines_logged_one_step_late_are_equal(base, tmp_path, monkeypatch, every):
    """Late logging changes neither metrics (except times) nor the sums in checkpoints, even after a stop."""

    def written(out: Path) -> list[Any]:
        when = f"--logging_steps {every} --eval_steps 4 --save_steps 5 --max_steps 11"
        flags = ["--output_dir", str(out), *when.split(), "--per_device_train_batch_size", "2", "--deterministic"]
        step = loop.Training._step

        def stopped(training: Any) -> float:
            if training.state.step == 6 and not (out / "checkpoint-7").exists():
                training.stop_requests._received = "SIGTERM"
            return step(training)

        with monkeypatch.context() as patch, pytest.raises(CollectiveError, match="after step 7"):
            patch.setattr(loop.Training, "_step", stopped)
            train(base, *flags)
        train(base, *flags)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        meters = [json.loads(path.read_text()) for path in sorted(out.glob("checkpoint-*/state.json"))]
        found = lines + [{"since": state["since_last_look"]} | state["meter"] for state in meters]
        timed = re.compile(r"(?<!padding)_(s|share)$|^(mfu|seconds)$")
        return [{name: value for name, value in row.items() if not timed.search(name)} for row in found]

    at_once = written(tmp_path / "at once")
    monkeypatch.setattr(loop, "Training", LogsLate)
    assert written(tmp_path / "late") == at_once
    steps = [row["step"] for row in at_once if "loss" in row]
    assert steps == {"1": [*range(1, 12)], "3": [1, 3, 4, 6, 8, 9, 11]}[every]
