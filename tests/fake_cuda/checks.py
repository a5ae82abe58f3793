"""Check the package's GPU code on fake tensors (machine.py): shapes, dtypes, devices, and where the host waits."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from machine import Event, Machine, on_gpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertOutput

from hvd_bert.config.settings import ParallelArguments, TrainArguments
from hvd_bert.data.collate import Batch, Collator
from hvd_bert.data.window_table import WindowTable
from hvd_bert.distributed.devices import RankInfo
from hvd_bert.distributed.world import World
from hvd_bert.evaluation import evaluator
from hvd_bert.evaluation.forward import span_logits, window_losses
from hvd_bert.model import attention
from hvd_bert.model.attention import by_efficient, by_flash, by_jagged, by_window, make_windows
from hvd_bert.model.bert import new_model
from hvd_bert.model.cpu.linear import Linear
from hvd_bert.model.precision import AUTOCAST, autocast
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.strategies.base import Strategy, StrategyOptions
from hvd_bert.strategies.dp import DPStrategy
from hvd_bert.tasks.base import MicroBatch
from hvd_bert.tasks.dataset import to_device
from hvd_bert.tools.bench.__main__ import parse
from hvd_bert.tools.bench.speed import RandomWindows, Recorder
from hvd_bert.training.breakdown import Breakdown
from hvd_bert.training.loop import Training
from hvd_bert.training.meter import DeferredScalars, Meter, Stopwatch, seconds_between
from hvd_bert.training.start import Start, prepare

GPU, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
LENGTHS = [5, 9, 3]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
KINDS = [("fp32", False), ("bf16", False), ("fp16", False), ("bf16", True)]  # precision, padded


class Waits(TorchDispatchMode):
    """Records the operations in which the host waits for the GPU, as torch.cuda.set_sync_debug_mode does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("copy_", "_to_copy"):
            source = args[1] if name == "copy_" else args[0]
            blocking = args[2:3] != (True,) and not (kwargs or {}).get("non_blocking")
            if GPU in (source.device, result.device) and source.device != result.device and blocking:
                self.found.append(name)
        elif name in ("_local_scalar_dense", "nonzero", "equal") and args[0].device == GPU:
            self.found.append(name)
        return result


CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check under its function's name."""
    CHECKS[function.__name__] = function
    return function


def table(lengths: list[int]) -> WindowTable:
    ones = [1] * len(lengths)
    columns = {"input_ids": [[7] * length for length in lengths], "context_start": ones, "question": ones}
    return WindowTable.from_columns(columns | {"start_position": ones, "end_position": ones})


def batch(padded: bool, device: torch.device = GPU, lengths: list[int] = LENGTHS) -> Batch:
    return Collator(table(lengths), device, 16 if padded else None)(range(len(lengths)))


def small_bert(dropout: float = 0.1, padded: bool = False) -> nn.Module:
    config = BertConfig(vocab_size=60, max_position_embeddings=64, **SIZES)
    return on_gpu(lambda: new_model(config, dropout, 0, padded))


def expect(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = GPU) -> None:
    assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (shape, dtype, device), tensor


# --- batches -------------------------------------------------------------------------------------


@check
def packed_batches_are_pinned_and_copied_in_one_piece() -> None:
    before = Machine.pinned
    made = batch(padded=False)
    for tensor in (made.input_ids, made.token_type_ids, made.position_ids):
        expect(tensor, (1, sum(LENGTHS)), torch.int64)
    for tensor in (made.starts, made.ends):
        expect(tensor, (len(LENGTHS),), torch.int64)
    assert made.cu_seqlens is not None
    expect(made.cu_seqlens, (len(LENGTHS) + 1,), torch.int32)
    assert made.cells is not None
    expect(made.cells, (sum(LENGTHS),), torch.int64)
    assert Machine.pinned - before == 1


@check
def padded_batches_are_pinned_and_copied_in_one_piece() -> None:
    before = Machine.pinned
    made = batch(padded=True, device=SECOND)
    expect(made.input_ids, (len(LENGTHS), 16), torch.int64, SECOND)
    assert made.attention_mask is not None
    expect(made.attention_mask, (len(LENGTHS), 16), torch.bool, SECOND)
    assert Machine.pinned - before == 1


@check
def batches_of_a_task_may_already_be_on_the_gpu() -> None:
    pair = namedtuple("pair", "x y")
    rows = torch.ones(2, 3)
    before = Machine.pinned
    copied = to_device({"a": [rows, rows.to(GPU)], "b": (pair(rows, 7), "text")}, GPU)
    assert Machine.pinned - before == 2
    for tensor in (*copied["a"], copied["b"][0].x):
        expect(tensor, (2, 3), torch.float32)
    assert type(copied["b"][0]) is pair and copied["b"][0].y == 7 and copied["b"][1] == "text"


# --- attention -----------------------------------------------------------------------------------


def attend(kernel: attention.Kernel, dtype: torch.dtype, dropout: float, size: int, window_size: int | None) -> None:
    """Run a kernel's forward and backward pass on query, key and value views as BERT makes them."""
    made = [torch.randn(1, sum(LENGTHS), 4, size, device=GPU, dtype=dtype, requires_grad=True) for _ in range(3)]
    query, key, value = (tensor.transpose(1, 2).squeeze(0).transpose(0, 1) for tensor in made)
    output = kernel(query, key, value, make_windows(LENGTHS, GPU, window_size), dropout, 0.5)
    expect(output, (sum(LENGTHS), 4, size), dtype)
    output.float().sum().backward()
    for tensor in made:
        assert tensor.grad is not None
        expect(tensor.grad, (1, sum(LENGTHS), 4, size), dtype)


@check
def every_kernel_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        attend(by_jagged, dtype, 0.1, 64, None)
        attend(by_window, dtype, 0.1, 64, None)
        attend(by_window, dtype, 0.1, 64, 2)
        attend(by_efficient, dtype, 0.1, 64, None)
        if dtype != torch.float32:
            attend(by_flash, dtype, 0.1, 64, None)
            attend(by_flash, dtype, 0.1, 64, 2)


# --- models and steps ----------------------------------------------------------------------------


def one_step(strategy: Strategy, made: Batch, precision: str) -> None:
    """Run a step of two micro-batches as the training loop does. Checks losses, gradients and optimizer state."""
    strategy.module.train()
    for _ in range(strategy.options.accumulation):
        with autocast(GPU, precision):
            losses = window_losses(strategy.module, made)
            expect(losses, (len(LENGTHS),), torch.float32)
            loss = losses.sum() / len(LENGTHS)
        strategy.backward(loss)
    strategy.synchronize()
    for name, parameter in strategy.model.named_parameters():
        assert parameter.grad is not None, name
        expect(parameter.grad, tuple(parameter.shape), torch.float32)
    expect(strategy.clip(), (), torch.float32)
    strategy.step()
    assert all(parameter.grad is None for parameter in strategy.model.parameters())
    for state in strategy.optimizer.state.values():
        assert {tensor.device for tensor in state.values()} == {GPU}


def made_strategy(kind: type[Strategy], precision: str, padded: bool, devices: int = 1) -> Strategy:
    world = World()
    world.device, world.devices = GPU, devices
    args = TrainArguments(fp16=precision == "fp16", bf16=precision == "bf16")
    model, options = small_bert(padded=padded), StrategyOptions(args, ParallelArguments(), 2)
    return kind(model, lambda module: torch.optim.AdamW(module.parameters(), fused=True), options, world)


@check
def a_step_in_every_precision() -> None:
    for precision, padded in KINDS:
        one_step(made_strategy(Strategy, precision, padded), batch(padded), precision)


@check
def no_step_waits_for_the_gpu() -> None:
    for precision in AUTOCAST:
        strategy, made = made_strategy(Strategy, precision, padded=False), batch(padded=False)
        with Waits() as waits:
            one_step(strategy, made, precision)
            DeferredScalars(1, GPU).put(torch.ones((), device=GPU))
        assert not waits.found
    with Waits() as waits:
        torch.ones(2, device=GPU).sum().item()
        torch.ones(2, device=GPU).cpu()
    assert waits.found == ["_local_scalar_dense", "_to_copy"]


@check
def no_logged_step_waits_for_the_gpu() -> None:
    recorder, now, waited, take, read = Recorder(), [0], set[int](), DeferredScalars.take, Meter.read

    class Noted(Event):
        def record(self, *_: Any) -> None:
            self.step = now[0]

        def synchronize(self) -> None:
            if self.step == now[0]:  # the GPU has nothing to do, because no later step is queued
                waited.add(self.step)

    def take_ones(scalars: DeferredScalars) -> list[float]:
        with unset_fake_temporarily():
            scalars._host = torch.ones(2, dtype=torch.float64)
            return take(scalars)

    def read_values(meter: Meter) -> dict[str, float]:
        with unset_fake_temporarily():  # the values are on the host
            return read(meter)

    def batches(step: int) -> Iterator[MicroBatch]:
        now[0] = step + 1
        return map(task.batch, task.plan.rank_windows(step, 0))

    with ExitStack() as patches:
        folder = Path(patches.enter_context(TemporaryDirectory()))
        patches.enter_context(patch("torch.cuda.Event", Noted))
        patches.enter_context(patch.object(DeferredScalars, "take", take_ones))
        patches.enter_context(patch.object(Meter, "read", read_values))
        patches.enter_context(patch.object(Breakdown, "results", lambda _: {}))  # its values would be fake
        (folder / "config.json").write_text(json.dumps({"model_type": "bert"} | SIZES), encoding="utf-8")
        world, config = World(), parse(["--steps=4", "--repeats=2", "--strategy=none", f"--model={folder}"])[1]
        world.device = GPU
        world.rank_infos = (RankInfo(0, world.host, 0, "cuda:0", None, frozenset({0})),)
        with unset_fake_temporarily():
            task: Any = RandomWindows(config, world)
        task.model = small_bert()
        start = Start(config, task).in_folder(folder)
        prepared = prepare(start, world)
        prepared.batches.close()  # its thread would make real tensors
        alone: Any = SimpleNamespace(micro_batches=batches, close=lambda: None)
        metrics_logger = MetricsLogger(folder, enabled=False, callbacks=[recorder])
        training = Training(start, replace(prepared, batches=alone), None, metrics_logger, world)
        with Waits() as waits:
            training.run()
    assert not waits.found
    assert waited == {12}, "only the last step"
    found = [[row[name] for name in ("step", "loss", "grad_norm", "step_s")] for row in recorder.rows]
    assert found == [[step, 1, 1, 0.001 / steps] for step, steps in ((1, 1), (4, 3), (8, 4), (12, 4))]


@check
def an_evaluation_waits_once_per_batch_while_the_next_one_is_queued() -> None:
    happened: list[str] = []

    class Noted(Event):
        def record(self, *_: Any) -> None:
            happened.append("queued")

        def synchronize(self, *_: Any) -> None:
            happened.append("waited")

    collate, forward = Collator(table([5, 9, 3, 4, 8, 6]), GPU), partial(evaluator.span_outputs, small_bert().eval())
    with patch("torch.cuda.Event", Noted), Waits() as waits:
        for _ in evaluator.batch_outputs(forward, collate, np.arange(6), 2, GPU, "bf16"):
            happened.append("read")
    assert not waits.found
    assert happened == ["queued", *["queued", "waited", "read"] * 2, "waited", "read"], happened


@check
def intervals_are_measured_by_the_gpu() -> None:
    stopwatch = Stopwatch(GPU)
    for phase in ("data", "compute", "compute"):
        stopwatch.end_interval(phase)
    intervals = stopwatch.take()
    assert [phase for phase, *_ in intervals] == ["data", "compute", "compute"]
    assert [seconds_between(*interval) for _, *interval in intervals] == [0.001] * 3


@check
def layers_for_cpus_are_not_used_on_a_gpu() -> None:
    kinds = {type(layer) for layer in small_bert().modules()}
    assert {nn.Linear, BertOutput} <= kinds and Linear not in kinds, kinds


@check
def logits_of_an_evaluation_are_fp32() -> None:
    for precision, padded in KINDS:
        model = small_bert(padded=padded).eval()
        with torch.no_grad(), autocast(GPU, precision):
            for logits in span_logits(model, batch(padded)):
                expect(logits, (len(LENGTHS), max(LENGTHS)), torch.float32)


@check
def dp_computes_on_each_gpu_in_the_precision_of_the_run() -> None:
    for precision in AUTOCAST:  # packed batches only: torch's code that splits padded ones needs a CUDA build
        strategy = made_strategy(DPStrategy, precision, padded=False, devices=2)
        seen: set[tuple[torch.device, torch.dtype]] = set()

        def note(_: object, __: object, output: Tensor, seen: Any = seen) -> None:
            seen.add((output.device, output.dtype))

        for layer in strategy.model.modules():
            if type(layer).__name__ == "BertIntermediate":
                layer.register_forward_hook(note)
        with autocast(GPU, precision):  # no backward pass, whose threads would share the fake tensors' mode
            expect(window_losses(strategy.module, batch(padded=False)), (len(LENGTHS),), torch.float32)
        assert seen == {(gpu, AUTOCAST[precision] or torch.float32) for gpu in (GPU, SECOND)}, seen
