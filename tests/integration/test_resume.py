"""Runs are stopped by signals or killed, and resumed, even with another world size and after a full disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import resuming
import stopping_at
from commands import printed, small_run
from launch import TRAIN, Outcome, launcher, run

from hvd_bert.config.command_line import override_argv
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_STOPPED

pytestmark = pytest.mark.integration

STOPPING = [sys.executable, stopping_at.__file__]
DROPOUT = ("--dropout", 0.1, "--save_steps", 2, "--logging_steps", 6)
STEPS_PER_EPOCH, STEPS = 3, 6  # as in small_run


def train(folder: Path, size: int, by: str, *flags: object, stop: str = "0 0 SIGTERM start") -> Outcome:
    """Run small_run with the output folder `folder`/out. `stop`: step, rank, signal and moment for stopping_at.py."""
    merged = override_argv([str(word) for word in DROPOUT], [str(flag) for flag in flags])
    words = small_run(size, "out", *merged)[len(TRAIN) :]
    cache = {"HVD_BERT_CACHE": str(folder.parent / "cache")}
    folder.mkdir(exist_ok=True)
    return run([*launcher(size, by), *STOPPING, *stop.split(), *words], folder, env=cache)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """World size -> the output folder of an uninterrupted run."""
    outputs = {}
    for size, by in ((1, "none"), (2, "gloo")):
        folder = tmp_path_factory.mktemp("whole") / str(size)
        train(folder, size, by).expect(0)
        outputs[size] = folder / "out"
    return outputs


@pytest.mark.parametrize(("by", "name"), [("mpi", "SIGTERM"), ("gloo", "SIGUSR2")])
def test_signal_to_one_rank_stops_all(tmp_path: Path, whole: dict[int, Path], by: str, name: str) -> None:
    stopped = train(tmp_path / "run", 2, by, stop=f"3 1 {name} start")
    assert not stopped.hung and stopped.status != 0, stopped
    assert printed(stopped).count(f"Stopped by {name} to rank 1 after step 3, saved in out/checkpoint-3") == 1, stopped
    again = printed(train(tmp_path / "run", 2, by).expect(0))
    assert "Resuming from step 3" in again and again.count("step 4/6 ") == 1, again
    assert resuming.differences(whole[2], tmp_path / "run" / "out") == []


# Start a command in a new terminal, and close the terminal once the command has stopped itself by SIGSTOP.
CLOSED_TERMINAL = """
import os, pty, select, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
while not os.waitpid(pid, os.WNOHANG | os.WUNTRACED)[0]:
    if select.select([terminal], [], [], 0.1)[0]:
        os.read(terminal, 65536)
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_closed_terminal_stops_and_saves(tmp_path: Path, whole: dict[int, Path]) -> None:
    command = small_run(1, "out", *DROPOUT)
    words = [*STOPPING, "4", "0", "SIGSTOP", "start", *command[3:]]
    run([sys.executable, "-c", CLOSED_TERMINAL, *words], tmp_path, cold=True).expect(EXIT_STOPPED)
    again = run(command, tmp_path).expect(0)
    assert again.output.count("Resuming from step 4: out/checkpoint-4") == 1, again
    assert resuming.differences(whole[1], tmp_path / "out") == []


def test_moved_output_folder_stops_the_run(tmp_path: Path, whole: dict[int, Path]) -> None:
    """The run saves its state in a new folder `out`, from which the same command resumes."""
    stopped = train(tmp_path / "run", 2, "gloo", stop="3 0 move start")
    assert not stopped.hung and stopped.status in (EXIT_STOPPED, 1), stopped
    # After step 3 if the write of checkpoint-2 fails, which notices the move first.
    (step,) = re.findall(r"Stopped by a move or removal of --output_dir after step ([34])\b", printed(stopped))
    warnings = [line for line in stopped.output.splitlines() if "warning" in line.lower()]
    assert all("TensorBoard" in line for line in warnings), stopped  # TensorBoard's thread may notice the move first
    assert (tmp_path / "run" / "moved" / "metrics.jsonl").exists()
    (saved,) = (tmp_path / "run" / "out").glob("checkpoint-*")
    assert saved.name == f"checkpoint-{step}", stopped
    train(tmp_path / "run", 2, "gloo").expect(0)
    differing = resuming.differences(whole[2], tmp_path / "run" / "out")
    assert [name for name in differing if not name.startswith("metrics.jsonl")] == []


@pytest.mark.parametrize(
    ("size", "by", "stop", "resumed"),
    [
        (1, "none", "1 0 SIGKILL start", "Training: "),  # before the first checkpoint
        (2, "mpi", "5 0 SIGKILL start", "Resuming from step [24]:"),  # the write of checkpoint-4 may be unfinished
        (2, "gloo", "5 1 SIGKILL start", "Resuming from step [24]:"),
    ],
)
def test_killed_and_started_again(
    tmp_path: Path, whole: dict[int, Path], size: int, by: str, stop: str, resumed: str
) -> None:
    killed = train(tmp_path / "run", size, by, stop=stop)
    assert not killed.hung and killed.status != 0, killed
    again = printed(train(tmp_path / "run", size, by).expect(0))
    assert re.search(resumed, again), again
    assert resuming.differences(whole[size], tmp_path / "run" / "out") == []


def test_other_world_sizes(tmp_path: Path) -> None:
    """Train on 4, 2, 1 and 4 ranks. An epoch uses each window once; global batch and losses do not change."""
    worlds = [(4, "gloo", 1), (2, "gloo", 2), (1, "none", 3), (4, "gloo", 0)]
    exact = ("--dropout", 0, "--logging_steps", 1, "--per_device_train_batch_size")
    for size, by, stop in worlds:
        outcome = train(tmp_path / "changing", size, by, *exact, 4, stop=f"{stop} 0 SIGTERM start")
        if stop:
            assert f"after step {stop}, saved in" in printed(outcome), outcome
        else:
            outcome.expect(0)
    taken = stopping_at.taken(tmp_path / "changing", STEPS)
    for epoch in range(STEPS // STEPS_PER_EPOCH):
        steps = [taken[epoch * STEPS_PER_EPOCH + step + 1] for step in range(STEPS_PER_EPOCH)]
        assert sum(steps, Counter()) == Counter(range(33))
        assert [sum(step.values()) for step in steps] == [16, 16, 1]
    train(tmp_path / "one", 1, "none", *exact, 16).expect(0)
    losses = [
        [row["loss"] for row in resuming.rows(tmp_path / name / "out") if "loss" in row] for name in ("changing", "one")
    ]
    assert len(losses[0]) == STEPS
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after step 4, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    outcome = train(folder, 1, "none", stop="4 0 SIGTERM start").expect(EXIT_STOPPED)
    assert outcome.output.count("Stopped by SIGTERM after step 4, saved in out/checkpoint-4") == 1
    assert {path.name for path in (folder / "out").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    return folder


@pytest.fixture
def stopped(tmp_path: Path, stopped_once: Path) -> Path:
    """A copy of the stopped run's folder that the test may change."""
    return Path(shutil.copytree(stopped_once, tmp_path / "run"))


@pytest.mark.parametrize(
    ("flags", "early", "reloaded"),
    [
        (["--load_best_model_at_end", "--early_stopping_patience", 2, "--learning_rate", 0.5], True, True),
        (["--load_best_model_at_end", "--learning_rate", 1e-3, "--num_train_epochs", 1], False, False),
        (["--early_stopping_patience", 1, "--learning_rate", 0.5], True, False),
    ],
    ids=["best and early end", "best is last", "early end"],
)
def test_best_model_and_early_end(tmp_path: Path, flags: list[object], early: bool, reloaded: bool) -> None:
    every_step = ("--eval_steps", 1, "--metric_for_best_model", "eval_loss", "--warmup_ratio", 0.0)
    outcome = train(tmp_path / "run", 1, "none", *every_step, "--num_train_epochs", 4, *flags).expect(0)
    out = tmp_path / "run" / "out"
    evaluated = [row for row in resuming.rows(out) if "eval_loss" in row]
    best = min(evaluated, key=lambda row: row["eval_loss"])
    assert ("Early stopping: no eval_loss better than at step" in outcome.output) == early
    trained = evaluated[:-1] if reloaded else evaluated
    assert [row["step"] for row in trained] == list(range(1, len(trained) + 1)), outcome
    assert (len(trained) < 12) and (not reloaded or trained[-1]["step"] == best["step"] + 2), outcome
    if reloaded:
        assert evaluated[-1] == best, "the score of the saved model has the step of the best one"
        assert (out / f"checkpoint-{best['step']}").is_dir()
    assert json.loads((out / "eval_results.json").read_text())["eval_loss"] == evaluated[-1]["eval_loss"]
    assert json.loads((out / "train_results.json").read_text())["evaluations"] == len(evaluated)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, which has room for two checkpoints, but not for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk]).returncode:
        pytest.skip("only root may mount a file system, and not everywhere")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk(tmp_path: Path, small_disk: Path) -> None:
    outcome = train(tmp_path / "run", 1, "none", "--output_dir", small_disk)
    assert outcome.status == 1, outcome
    assert "could not be written" in outcome.output and "No space left on device" in outcome.output, outcome
    assert "Traceback" not in outcome.output, outcome
    names = sorted(path.name for path in small_disk.glob("checkpoint-*"))
    assert names, outcome
    copied = shutil.copytree(small_disk, tmp_path / "run" / "copied")
    again = train(tmp_path / "run", 1, "none", "--output_dir", copied)
    assert f"Resuming from step {names[-1].removeprefix('checkpoint-')}" in again.expect(0).output


def test_read_only_disk(stopped: Path, whole: dict[int, Path], small_disk: Path) -> None:
    shutil.copytree(stopped / "out", small_disk / "out")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    refused = train(stopped, 1, "none", "--output_dir", small_disk / "out").expect(EXIT_BAD_INPUT)
    assert "cannot be written: Read-only file system" in refused.output, refused
    elsewhere = ("--resume_from_checkpoint", small_disk / "out" / "checkpoint-2", "--output_dir", "new")
    train(stopped, 1, "none", *elsewhere).expect(0)
    assert resuming.rows(stopped / "new") == [row for row in resuming.rows(whole[1]) if row["step"] > 2]
