"""Figures of a training: rates and shares per section of steps, and memory over the computed need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor, nn

from hvd_bert.data.batch_plan import BatchPlan, Lengths
from hvd_bert.distributed.world import World
from hvd_bert.model.precision import autocast
from hvd_bert.monitoring.process_usage import seconds_since_start
from hvd_bert.tasks.base import Task
from hvd_bert.training.meter import PHASES
from hvd_bert.training.metrics_log import MetricsLogger

FP32_BYTES = 4
STATES = 4  # weight, gradient and AdamW's two moments of each parameter


class Recorder(MetricsLogger):
    """Keeps a training's metrics in memory instead of writing them."""

    def __init__(self) -> None:
        super().__init__(Path(), enabled=False)
        self.rows: list[dict[str, float]] = []
        self.first_step_s = 0.0

    def logged(self, step: int, metrics: dict[str, float]) -> None:
        """Keep a row of metrics.jsonl."""
        if not self.rows:
            self.first_step_s = seconds_since_start()
        self.rows.append({"step": step, **metrics})


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


def imbalance(plan: BatchPlan, steps: range) -> float:
    """Maximum over mean of the tokens per rank, averaged over `steps`."""
    return fmean(plan.imbalance(step) for step in steps)


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
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        losses = forward()
    del losses
    return sum(kept.values())
