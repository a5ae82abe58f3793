"""Matmul throughput of this processor, for matrix products of the model's sizes."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hvd_bert.model.cpu import linear
from hvd_bert.model.precision import AUTOCAST

ROUNDS, ROUND_S = 5, 0.15


def matmul_peak(model: nn.Module, tokens: int, device: torch.device, precision: str) -> float:
    """FLOP/s of this rank for `tokens` rows: the median over rounds of the model's largest linear layer, and back.

    On CPUs the faster of torch's and oneDNN's product. Ranks measure at the same time, so they share the machine as in
    training.
    """
    layers = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    hidden, inner = sorted(max(layers, key=Tensor.numel).shape)
    dtype = AUTOCAST[precision] or torch.float32
    rows = torch.randn(tokens, hidden, device=device, dtype=dtype)
    up = torch.randn(inner, hidden, device=device, dtype=dtype)
    down = torch.randn(hidden, inner, device=device, dtype=dtype)
    products: list[Any] = [torch.nn.functional.linear]
    if device.type == "cpu" and precision == "fp32" and linear.available():
        products.append(linear.product)

    def seconds(product: Any, pairs: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(pairs):
            product(product(rows, up), down)
        _wait(device)
        return time.perf_counter() - start

    rates: list[float] = []
    with torch.no_grad():
        for product in products:
            seconds(product, 2)
            pairs = max(1, round(ROUND_S / (seconds(product, 4) / 4)))
            rates.append(median(pairs / seconds(product, pairs) for _ in range(ROUNDS)))
    return max(rates) * float(4 * tokens * hidden * inner)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
