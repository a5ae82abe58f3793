"""Trainings with --cuda_graphs on two ranks, under tests/graph_stand_in.py in place of CUDA's graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import resuming
from commands import losses, small_run
from launch import REPOSITORY, Outcome, launcher, run

pytestmark = pytest.mark.integration
PROGRAM = [sys.executable, REPOSITORY / "tests" / "graph_stand_in.py"]
SAVED = ("--save_steps", 2, "--save_total_limit", 3)
FLAGS = ("--cuda_graphs", "--dropout", 0.1, "--ema_decay", 0.9, "--eval_strategy", "epoch", *SAVED)


def train(folder: Path, strategy: str, *flags: object, most: int = 8) -> Outcome:
    """small_run into FOLDER/out. `most`: how many sizes of batches may have graphs."""
    own = [str(flag) for flag in (*FLAGS, "--strategy", strategy, *flags)]
    _, _, *words = small_run(2, "out", *own)
    folder.mkdir(exist_ok=True)
    starts = launcher(2, "gloo" if strategy == "horovod" else "torchrun")
    environ = {"MOST_GRAPHS": str(most), "GPU_GRAPHS": str(folder / "replays")}
    outcome = run([*starts, *PROGRAM, *words], folder, env=environ).expect(0)
    replays = (folder / "replays").read_text().split()
    assert len(replays) == 2 and all((int(count) > 0) == (most > 0) for count in replays)
    return outcome


@pytest.mark.parametrize("strategy", ["horovod", "ddp"])
def test_two_ranks_train_and_resume_as_without_graphs(tmp_path: Path, strategy: str) -> None:
    """With dropout, accumulation, and evaluations of averaged weights in between."""
    flags = ("--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 2)
    graphed, eager = tmp_path / "graphed", tmp_path / "eager"
    assert "CUDA graphs: 4 part(s)" in train(graphed, strategy, *flags).output  # embeddings, two layers, head
    train(eager, strategy, *flags, most=0)
    assert losses(graphed / "out") == losses(eager / "out")
    assert resuming.differences(graphed / "out", eager / "out") == []
    resumed = tmp_path / "resumed"
    checkpoint = graphed / "out" / "checkpoint-2"
    train(resumed, strategy, *flags, "--resume_from_checkpoint", checkpoint)
    weights = [(folder / "out" / "model.safetensors").read_bytes() for folder in (graphed, resumed)]
    assert weights[0] == weights[1]


def test_proof(tmp_path: Path) -> None:
    """The ranks, with graphs, do the work of one process without."""
    words = ["hvd_bert.tools.doctor", "--prove", "--cuda_graphs"]
    run([*launcher(2, "gloo"), *PROGRAM, *words], tmp_path, env={"MOST_GRAPHS": "8"}).expect(0)
