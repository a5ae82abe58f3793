"""Figures of a training: rates and shares per section of steps, memory over the computed need, and the matmul peak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.data.batch_plan import Lengths
from hvd_bert.distributed.world import World
from hvd_bert.model.cpu import kernels, linear
from hvd_bert.model.precision import AUTOCAST, autocast, evaluating
from hvd_bert.monitoring import PHASES
from hvd_bert.output.callback import Callback
from hvd_bert.output.metrics_log import MetricsLogger
from hvd_bert.tasks.base import Task

FP32_BYTES = 4
ROUNDS, ROUND_S = 5, 0.15  # of the matmul peak
STATES = 4  # weight, gradient and AdamW's two moments of each parameter


class Recorder(Callback):
    """Keeps a training's metrics in memory: the rows of metrics.jsonl."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append({"step": step, **metrics})

    def logger(self, *others: Callback) -> MetricsLogger:
        """A training's logger that writes nothing and calls this callback and others."""
        logger = MetricsLogger(Path(), enabled=False)
        logger.callbacks = [self, *others]
        return logger


def section_figures(
    row: dict[str, float], lengths: Iterable[Lengths], flops: Callable[[Lengths], float | None], peak: float
) -> dict[str, float]:
    """The figures of one section of steps.

    `row`: as logged at its end. `lengths`: tokens per window, for each step. `flops`: of a step's windows, None if
    unknown. `peak`: matmul FLOP/s of all ranks.
    """
    steps = list(lengths)
    counts = [count for count in map(flops, steps) if count is not None]
    rate = sum(counts) / (row["step_s"] * len(steps))
    return {
        "windows_per_s": row["windows_per_s"],
        "tokens_per_s": row["tokens_per_s"],
        "step_s": row["step_s"],
        **({"useful_gflops": rate / 1e9, "matmul_utilization": rate / peak} if counts else {}),
        **({"mfu": row["mfu"]} if "mfu" in row else {}),
        **{f"{phase}_share": row[f"{phase}_s"] / row["step_s"] for phase in PHASES if f"{phase}_s" in row},
    }


def spread(sections: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum over the sections, per figure."""
    columns = {name: [section[name] for section in sections] for name in sections[0]}
    return {name: {"median": median(c), "least": min(c), "most": max(c)} for name, c in columns.items()}


def padding_share(rows: list[dict[str, float]]) -> float:
    """Share of padding in the computed positions, over all ranks and sections. `rows`: as logged at their ends."""
    tokens = [row["tokens_per_s"] * row["step_s"] for row in rows]
    positions = [count / (1 - row["padding_share"]) for count, row in zip(tokens, rows, strict=True)]
    return 1 - sum(tokens) / sum(positions)


def memory_needed(task: Task, world: World, steps: range, precision: str) -> int:
    """Bytes of weights, gradients and optimizer state, and of the activations that the largest batch saves."""
    model, plan = task.model, task.plan
    assert plan is not None
    of_steps = [ids for step in steps for ids in plan.rank_windows(step, world.rank)]
    largest = task.batch(max(of_steps, key=lambda ids: int(plan.lengths[ids].sum())))
    with autocast(world.device, precision):
        kept = kept_bytes(model, lambda: task.losses(model, largest))
    return STATES * FP32_BYTES * sum(p.numel() for p in model.parameters()) + kept


def kept_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the activations that a forward pass saves for the backward pass."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        # A jagged tensor, as by_jagged saves, has no memory of its own.
        storage = (tensor.values() if tensor.is_nested else tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        losses = forward()
    del losses
    return sum(kept.values())


def evaluation_rate(task: Task, steps: range, device: torch.device, precision: str) -> float:
    """Windows/s of these steps' batches in passes without gradients, in a world of 1."""
    assert task.plan is not None
    batches = [task.batch(ids) for step in steps for ids in task.plan.rank_windows(step, 0)]
    with evaluating(task.model), autocast(device, precision):
        for timed in (batches[:1], batches):  # the first one warms up
            _wait(device)
            start = time.perf_counter()
            for batch in timed:
                task.losses(task.model, batch)
            _wait(device)
    return sum(batch.num_windows for batch in batches) / (time.perf_counter() - start)


def matmul_peak(model: nn.Module, tokens: int, device: torch.device, precision: str) -> float:
    """FLOP/s of this rank for `tokens` rows: the median over rounds of the model's largest linear layer, and back.

    On CPUs the faster of torch's product and the one that `auto` chooses. Ranks measure at the same time, so they
    share the machine as in training.
    """
    layers = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    hidden, inner = sorted(max(layers, key=Tensor.numel).shape)
    dtype = AUTOCAST[precision] or torch.float32
    rows = torch.randn(tokens, hidden, device=device, dtype=dtype)
    up = torch.randn(inner, hidden, device=device, dtype=dtype)
    down = torch.randn(hidden, inner, device=device, dtype=dtype)
    products: list[Any] = [torch.nn.functional.linear]
    own = kernels.default_choice().fp32
    if device.type == "cpu" and precision == "fp32" and own.linear != kernels.TORCH:
        products.append(linear.product)

    def seconds(product: Any, pairs: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(pairs):
            product(product(rows, up), down)
        _wait(device)
        return time.perf_counter() - start

    rates: list[float] = []
    with torch.no_grad(), kernels.override(own):
        for product in products:
            seconds(product, 2)
            pairs = max(1, round(ROUND_S / (seconds(product, 4) / 4)))
            rates.append(median(pairs / seconds(product, pairs) for _ in range(ROUNDS)))
    return max(rates) * float(4 * tokens * hidden * inner)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
