"""--cuda_graphs trains as without graphs, under tests/graph_stand_in.py in place of CUDA's."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path
from typing import Any

import gpu_kernels
import graph_stand_in
import pytest
import torch
from refusals import refused
from test_families import PACKED, small
from test_world import make_world
from torch import nn
from torch.nn.utils import clip_grad
from transformers import BertConfig

from hvd_bert.config.command_line import parse
from hvd_bert.data.collate import Bucket
from hvd_bert.distributed.world import CollectiveError
from hvd_bert.model import attention, cuda_graphs
from hvd_bert.model.layers import place
from hvd_bert.tools.bench import measure
from hvd_bert.tools.bench.__main__ import parse as parse_bench
from hvd_bert.tools.bench.speed import random_task
from hvd_bert.training import graphs
from hvd_bert.training.loop import Training
from hvd_bert.training.start import Start, prepare

pytestmark = pytest.mark.slow
LENGTH = "64"  # the positions of small models


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, and a GPU's attention, on the CPU."""
    graph_stand_in.install(monkeypatch.setattr)
    gpu_kernels.register()
    monkeypatch.setattr(gpu_kernels, "LIMITS", False)  # fp32 and small heads
    monkeypatch.setattr(attention, "choose", lambda *_: attention.by_flash)


def prepared(folder: Path, *flags: str, frozen: bool = False) -> Training:
    """A training of an encoder in `folder` on random windows. `frozen`: its embeddings and first layer are."""
    config = parse_bench(["--strategy=none", "--steps=5", "--repeats=3", "--cuda_graphs", *flags])[1]
    world = make_world()
    task = random_task(str(folder), 400, config, world)
    place(task.model, world.device, compiled=True)
    if frozen:
        for part in (task.model.base_model.embeddings, task.model.base_model.encoder.layer[0]):
            part.requires_grad_(False)
    start = Start(config, task)
    return Training(start.in_folder(folder), prepare(start, world), None, measure.Recorder().logger(), world)


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, graphed: bool = True, **how: bool) -> Any:
    """Losses, weights and the optimizer's state of 20 steps.

    `graphed`: else the same batches are trained on eagerly. `layers`: a graph per layer, not for the whole model.
    `unpadded`: the same windows without those that pad a batch. `frozen`: see `prepared`.
    """
    monkeypatch.setattr(graphs, "MOST", 8 if graphed else 0)
    replays = graph_stand_in.replayed.replays
    with monkeypatch.context() as patch:
        if how.get("layers"):
            patch.setattr(graphs, "parts_of", lambda model, _: cuda_graphs.parts_of(model, whole=False))
        if how.get("unpadded"):
            patch.setattr(Bucket, "padding", lambda *_: [])
        words = [f"--max_seq_length={LENGTH}", "--per_device_train_batch_size=10", *flags]
        training = prepared(folder, *words, frozen=how.get("frozen", False))
        recorder = training.metrics_logger.callbacks[0]
        training.run()
    state = {} if training.task.adapter_files else training.state.strategy.state()[1]
    assert (graph_stand_in.replayed.replays > replays) == graphed and "forward" not in vars(training.task.model)
    return [row["loss"] for row in recorder.rows], training.task.model.state_dict() | state


def same(one: Any, other: Any) -> bool:
    return one[0] == other[0] and all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("layers", [False, True], ids=["whole", "layers"])
def test_every_family_trains_as_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layers: bool
) -> None:
    small(family).save_pretrained(tmp_path)
    found = trained(tmp_path, monkeypatch, "--dropout=0", layers=layers)
    assert same(found, trained(tmp_path, monkeypatch, "--dropout=0", graphed=False))
    unpadded = trained(tmp_path, monkeypatch, "--dropout=0", graphed=False, unpadded=True)
    assert found[0] == pytest.approx(unpadded[0], abs=1e-5)


WAYS = {
    "dropout": ["--dropout=0.1"],
    "bf16": ["--bf16"],
    "accumulation": ["--gradient_accumulation_steps=2"],
    "LoRA": ["--lora_rank=2"],
    "EMA": ["--ema_decay=0.9"],
    "frozen": [],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [False, True], ids=["whole", "layers"])
def test_every_way_of_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, layers: bool) -> None:
    small("bert").save_pretrained(tmp_path)
    how = {"layers": layers, "frozen": way == "frozen"}
    found, eager = (trained(tmp_path, monkeypatch, *WAYS[way], graphed=graphed, **how) for graphed in (True, False))
    assert same(found, eager)


def test_rare_sizes_run_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small("bert").save_pretrained(tmp_path)
    monkeypatch.setattr(graphs, "STEPS", 1)  # of a few sizes, one is seen
    found, eager = (trained(tmp_path, monkeypatch, "--dropout=0.1", graphed=graphed) for graphed in (True, False))
    assert same(found, eager)


def test_compiled_layers_are_inside_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    small("bert").save_pretrained(tmp_path)
    flags = ["--dropout=0", "--torch_compile"]
    found, eager = (trained(tmp_path, monkeypatch, *flags, graphed=graphed, layers=True) for graphed in (True, False))
    assert found[0] == pytest.approx(eager[0], abs=1e-5)


@pytest.mark.parametrize("windows", [8, 32])
@pytest.mark.parametrize("layers", [False, True], ids=["whole", "layers"])
def test_a_step_is_at_most_150_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: int, layers: bool
) -> None:
    """Of a model with BERT-base's layers; without graphs it is more than 800."""
    BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=1100).save_pretrained(tmp_path)
    monkeypatch.setattr(clip_grad, "_has_foreach_support", lambda *_: True)  # as of a GPU's tensors
    monkeypatch.setattr(clip_grad, "_device_has_foreach_support", lambda _: True)
    monkeypatch.setattr(graphs, "parts_of", lambda model, _: cuda_graphs.parts_of(model, whole=not layers))
    training = prepared(tmp_path, "--bf16", f"--per_device_train_batch_size={windows}")
    training.state.strategy.module.train()
    training._step()  # allocates the optimizer's state
    with graph_stand_in.counted_launches() as counted:
        training._step()
    assert counted.replays == (2 * (1 + 12 + 1) if layers else 2) and counted.launches <= 150


@pytest.mark.parametrize(
    "flags",
    [["--strategy", "fsdp"], ["--gradient_checkpointing"], ["--per_device_train_batch_size", "auto"]],
    ids=lambda flags: flags[0],
)
def test_what_graphs_cannot_do_is_refused(flags: list[str]) -> None:
    with refused("--cuda_graphs", *flags):
        parse(["--cuda_graphs", *flags])


def test_a_family_without_packed_windows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small("mpnet").save_pretrained(tmp_path)
    with refused("--cuda_graphs", "mpnet", error=CollectiveError):
        trained(tmp_path, monkeypatch)
