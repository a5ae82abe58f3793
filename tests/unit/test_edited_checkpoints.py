"""Checkpoints that were edited by hand, with checksums made to match: a run falls back to the one before."""

from __future__ import annotations

import math
import operator
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import documented
import pytest
import torch

from hvd_bert import train
from hvd_bert.checkpoint import files
from hvd_bert.checkpoint.files import Contents

PROGRAM: dict[str, Any] = {"__name__": "digits"}
exec(documented.own_task(), PROGRAM)

Edit = Callable[[dict[str, Any], dict[str, dict[str, Any]]], object]  # of the state and the tensors


def trained(out: Path) -> bytes:
    """The weights that training ends with in this folder, from its newest valid checkpoint if there is one."""
    settings = {"max_steps": 4, "save_steps": 2, "ema_decay": 0.9, "deterministic": True, "num_threads": 1}
    train(task=PROGRAM["Digits"], output_dir=out, strategy="none", eval_strategy="no", **settings)
    return (out / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, trained(out)


def changed(*path: Any, to: Any) -> Edit:
    """Sets the value at these keys of state.json."""
    return lambda state, _: operator.setitem(reduce(operator.getitem, path[:-1], state), path[-1], to)


def removed(*path: Any) -> Edit:
    return lambda state, _: operator.delitem(reduce(operator.getitem, path[:-1], state), path[-1])


def tensor(file: str, slot: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Changes the first tensor of a file with this in its name."""

    def edit(_: object, tensors: dict[str, dict[str, Any]]) -> None:
        name = min(name for name in tensors[file] if slot in name)
        tensors[file][name] = change(tensors[file][name]).clone()

    return edit


def lost(file: str, slot: str = "") -> Edit:
    """Removes the first tensor with this in its name."""
    return lambda _, tensors: tensors[file].pop(min(name for name in tensors[file] if slot in name))


EDITS: dict[str, tuple[str, Edit]] = {
    "step of another folder": ("state.json", changed("step", to=3)),
    "step 10^400": ("state.json", changed("step", to=10**400)),
    "an empty state": ("state.json", lambda state, _: state.clear()),
    "world of 0 ranks": ("state.json", changed("world_size", to=0)),
    "no parameter groups": ("state.json", removed("strategy", "groups")),
    "one group less": ("state.json", removed("strategy", "groups", 0)),
    "learning rate as text": ("state.json", changed("strategy", "groups", 0, "lr", to="fast")),
    "scaler without its scale": ("state.json", changed("strategy", "scaler", to={"growth_factor": 2.0})),
    "schedule ahead of the step": ("state.json", changed("schedule", "last_epoch", to=9)),
    "sums of the wrong number": ("state.json", changed("since_last_look", to=[[1.0, 2]])),
    "sums that are infinite": ("state.json", changed("since_last_look", 0, 1, to=math.inf)),
    "best step ahead": ("state.json", changed("best", "step", to=9)),
    "pending as a list": ("state.json", changed("eval_pending", to=[1])),
    "kernels of the wrong type": ("state.json", changed("cpu_kernels", to=[1])),
    "no weight": ("model.safetensors", lost("model")),
    "whole numbers as a weight": ("model.safetensors", tensor("model", "weight", lambda t: t.long())),
    "no weight to train on": ("unaveraged.safetensors", lost("unaveraged")),
    "no optimizer": ("optimizer.safetensors", lambda _, tensors: tensors.pop("optimizer")),
    "a moment is missing": ("optimizer.safetensors", lost("optimizer", "exp_avg_sq")),
    "moment of another shape": ("optimizer.safetensors", tensor("optimizer", "exp_avg", lambda t: t.flatten()[:-1])),
    "moment of no shape": ("optimizer.safetensors", tensor("optimizer", "exp_avg", torch.Tensor.sum)),
    "steps of a shape": ("optimizer.safetensors", tensor("optimizer", "step", lambda t: t.repeat(3))),
    "a name without slot": (
        "optimizer.safetensors",
        lambda _, tensors: tensors["optimizer"].update(x=torch.zeros(())),
    ),
    "no random numbers": ("rng.safetensors", lambda _, tensors: tensors["rng"].clear()),
    "generator of another length": ("rng.safetensors", tensor("rng", "numpy", lambda t: t[:-9])),
    "generator of an unknown version": ("rng.safetensors", tensor("rng", "python", lambda t: t * 0 + 9)),
}


@pytest.mark.parametrize(("file", "edit"), EDITS.values(), ids=EDITS.keys())
@pytest.mark.slow
def test_an_edited_checkpoint_is_named_and_the_one_before_it_used(finished, tmp_path, capsys, file, edit):
    run = shutil.copytree(finished[0], tmp_path / "run")
    (run / "train_results.json").unlink()
    contents = files.read(run / "checkpoint-4")
    edit(contents.state, contents.tensors)
    files.write(run, 4, Contents(contents.tensors, contents.state))
    assert trained(run) == finished[1]
    output = "".join(capsys.readouterr())
    assert output.count(f"Skipping a damaged checkpoint: {run / 'checkpoint-4' / file}") == 1, output
    assert f"Resuming from step 2: {run / 'checkpoint-2'}" in output, output
