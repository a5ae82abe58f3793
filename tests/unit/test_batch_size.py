"""`--per_device_train_batch_size auto`: as many windows as fit, on the rank with the least memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from refusals import refused
from test_world import make_world
from torch import Tensor, nn

from hvd_bert import machine
from hvd_bert.config.command_line import parse
from hvd_bert.tasks.base import load_task, task_name
from hvd_bert.tasks.dataset import DatasetTask, Examples
from hvd_bert.training import batch_size

MIB = 2**20


class Wide(DatasetTask):
    """A window needs 48 MiB: its output, the gradient of that, and what `exp` makes of it."""

    def load(self, config: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.train = Examples.of_tensors(torch.zeros(300, 1))

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        wide = model(batch[0]).expand(-1, 4 * MIB).exp()
        return wide.mean(1), wide

    def score(self, outputs: Tensor) -> dict[str, float]:
        return {}


def chosen(monkeypatch: pytest.MonkeyPatch, free_mib: int, *flags: str, other_rank: int | None = None) -> int:
    """`other_rank`: how many windows fit there."""
    monkeypatch.setattr(machine, "free_memory", lambda: free_mib * MIB)
    config, world = parse([f"--task={task_name(Wide)}", "--per_device_train_batch_size=auto", *flags]), make_world()
    world.set_up_device()
    task = load_task(config, world, Wide)
    if other_rank:
        monkeypatch.setattr(world, "allgather", lambda mine: [mine, other_rank] if isinstance(mine, int) else [mine])
    number = batch_size.choose(task, config.train, None, world)
    assert number is not None
    return number


def chosen_alone(free_mib: int) -> int:
    """The same in a process of its own, in which no other test has left memory that is free already."""
    code = f"import pytest, test_batch_size as test; print(test.chosen(pytest.MonkeyPatch(), {free_mib}))"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | path, capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_as_many_windows_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen_alone(2000)  # of which 80 % are used
    assert 0.8 * 0.8 * 2000 < 48 * found < 1.1 * 0.8 * 2000
    assert chosen(monkeypatch, 2000, other_rank=3) == 3
    assert chosen(monkeypatch, 2000, "--global_batch=7") == 7
    assert chosen(monkeypatch, 2000, "--global_batch=7", "--gradient_accumulation_steps=2") == 4
    assert chosen(monkeypatch, 10**6) == 300, "all of the data"
    with refused("auto", "GiB"):
        chosen(monkeypatch, 10)
