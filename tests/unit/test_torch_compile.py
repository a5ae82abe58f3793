"""--torch_compile_mode reduce-overhead without a GPU. tests/gpu tests the mode on a GPU."""

from __future__ import annotations

from functools import partialmethod
from pathlib import Path

import pytest
import torch
from test_bench import small_training
from torch import nn

from hvd_bert.data.collate import BUCKET, Collator
from hvd_bert.evaluation.forward import window_losses
from hvd_bert.model.precision import evaluating
from hvd_bert.training.loop import Training

MODE = ["--torch_compile_mode", "reduce-overhead"]
STEPS = 50


@pytest.fixture
def training(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    """Set up a training of a small BERT without dropout, on windows as long as SQuAD's.

    `request.param`: additional flags. The compiler's final stage, which captures CUDA graphs, is omitted: it is slow.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return small_training(tmp_path, f"--steps={STEPS}", "--repeats=1", "--dropout=0", *MODE, *request.param)


@pytest.mark.slow
@pytest.mark.parametrize("training", [["--per_device_train_batch_size=32"]], indirect=True)
def test_batches_have_few_sizes_and_the_usual_losses(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each additional batch size would need another captured graph, and each additional compilation takes minutes."""
    marks: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(None))
    task, sizes, graphs = training.task, set[int](), set[int]()
    collate = Collator(task.train.windows, torch.device("cpu"))  # type: ignore[attr-defined]
    for step in range(STEPS):
        (ids,) = training.plan.rank_windows(step, 0)
        batch = task.batch(ids).content
        sizes.add(batch.num_positions)
        losses = window_losses(task.model, batch)
        losses.sum().backward()
        with evaluating(task.model, eager=True):
            torch.testing.assert_close(losses, window_losses(task.model, collate(ids)), rtol=1e-5, atol=1e-5)
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(sizes) <= 6 and all(size % BUCKET == 0 for size in sizes)
    assert len(graphs) == 1  # only the first batch compiles; evaluation does not
    assert len(marks) == 2 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("training", [["--gradient_accumulation_steps=2"]], indirect=True)
def test_gradients_are_not_in_the_memory_of_a_graph(training: Training) -> None:
    """Gradients need their own memory: in a graph's memory, a step's second micro-batch would overwrite the first's."""
    before = {name: weight.grad for name, weight in training.task.model.named_parameters()}
    training.state.strategy.module.train()
    training._step()
    assert all(weight.grad is before[name] is not None for name, weight in training.task.model.named_parameters())
    assert not any(gradient.any() for gradient in before.values())  # zeroed for the next step
