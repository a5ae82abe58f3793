"""Flags for memory: --gradient_checkpointing, and --per_device_train_batch_size auto."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partialmethod
from typing import Any

import pytest
import torch
from refusals import refused
from test_bench import small_training
from test_world import make_world
from torch import Tensor, nn

from hvd_bert import machine
from hvd_bert.config.command_line import parse
from hvd_bert.model.precision import recompute_layers
from hvd_bert.tasks.base import load_task, task_name
from hvd_bert.tasks.dataset import DatasetTask, Examples
from hvd_bert.tools.bench.speed import Recorder
from hvd_bert.training import batch_size

pytestmark = pytest.mark.slow


def trained(tmp_path, *flags):
    """Train for a few steps. Returns losses, weights with AdamW's state, and bytes that a forward pass saves."""
    words = ["--per_device_train_batch_size=3", "--gradient_accumulation_steps=2", "--steps=2", "--repeats=1", *flags]
    training = small_training(tmp_path, *words, callbacks=[recorder := Recorder()])
    training.run()
    weights, moments, _ = training.state.strategy.state()
    task = training.task
    batch = task.batch(training.plan.rank_windows(0, 0)[0])
    saved = saved_bytes(task.model, lambda: task.losses(task.model, batch))
    return [row["loss"] for row in recorder.rows], weights | moments, saved


def saved_bytes(model, forward):
    """Return the bytes of the activations that a forward pass saves for the backward pass."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}

    def count(tensor):
        storage = (tensor.values() if tensor.is_nested else tensor).untyped_storage()  # jagged tensors own no memory
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        losses = forward()
    del losses
    return sum(saved.values())


@pytest.mark.parametrize("flags", [["--dropout", "0.1", "--padding", "longest"], ["--bf16"]])
def test_training_is_the_same_to_the_bit_with_less_memory(tmp_path, flags):
    losses, state, saved = trained(tmp_path, *flags)
    other_losses, other_state, other_saved = trained(tmp_path, *flags, "--gradient_checkpointing")
    assert losses == other_losses and losses[0] != losses[1]
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert other_saved < 0.4 * saved


def test_compiled_layers(tmp_path, monkeypatch):
    """With --torch_compile, results differ only by rounding, and recomputation still saves memory."""
    compile_in_full = nn.Module.compile  # the patch omits the slow code generation
    monkeypatch.setattr(nn.Module, "compile", partialmethod(compile_in_full, backend="aot_eager"))
    losses, state, saved = trained(tmp_path, "--dropout", "0")
    compiled = trained(tmp_path, "--dropout", "0", "--torch_compile", "--gradient_checkpointing")
    assert compiled[0] == pytest.approx(losses, abs=1e-5)
    assert all(torch.allclose(compiled[1][name], state[name], atol=1e-4) for name in state)
    assert compiled[2] < 0.4 * saved


def test_models_without_checkpointing_are_refused():
    with refused("--gradient_checkpointing", "Linear"):
        recompute_layers(nn.Linear(2, 2))


MIB = 2**20


class Wide(DatasetTask):
    """A task that needs 48 MiB per window: 16 each for the output, its gradient, and the input gradient of `exp`."""

    def load(self, config: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.train = Examples.of_tensors(torch.zeros(300, 1))

    def forward(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        wide = model(batch[0]).expand(-1, 4 * MIB).exp()
        return wide.mean(1), wide

    def score(self, outputs: Tensor) -> dict[str, float]:
        return {}


def chosen(monkeypatch: pytest.MonkeyPatch, free_mib: int, *flags: str, other_rank: int | None = None) -> int:
    """Return the batch size that `auto` chooses. `other_rank`: the number of windows that fit on rank 1, if any."""
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
    """Call `chosen` in a new process, whose allocator does not retain memory freed by other tests."""
    code = f"import pytest, test_recomputation as test; print(test.chosen(pytest.MonkeyPatch(), {free_mib}))"
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | path, capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1])


def test_as_many_windows_as_fit(monkeypatch):
    found = chosen_alone(2000)  # `auto` uses 80 % of the free memory
    assert 0.8 * 0.8 * 2000 < 48 * found < 1.1 * 0.8 * 2000
    assert chosen(monkeypatch, 2000, other_rank=3) == 3
    assert chosen(monkeypatch, 2000, "--global_batch=7") == 7
    assert chosen(monkeypatch, 2000, "--global_batch=7", "--gradient_accumulation_steps=2") == 4
    assert chosen(monkeypatch, 10**6) == 300, "all of the data"
    with refused("auto", "GiB"):
        chosen(monkeypatch, 10)
