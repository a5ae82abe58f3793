"""What this processor reaches in nothing but matrix products, of the size that the model's are."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from hvd_bert import linear
from hvd_bert.model import autocast

ROUNDS, ROUND_S = 5, 0.15


def matmul_peak(model: Any, tokens: int, device: torch.device, precision: str) -> float:
    """FLOP per second of this rank: the median of some rounds of products [tokens, h] x [h, i] and back, by config.

    On the CPU the faster of torch's product and oneDNN's. Ranks that measure together share the machine as in training.
    """
    with torch.no_grad(), autocast(device, precision):
        kinds: list[Any] = [torch.nn.functional.linear]
        if device.type == "cpu" and precision == "fp32" and linear.available():
            kinds.append(linear.product)
        return max(_rate(kind, model.hidden_size, model.intermediate_size, tokens, device) for kind in kinds)


def _rate(product: Any, hidden: int, inner: int, tokens: int, device: torch.device) -> float:
    rows = torch.randn(tokens, hidden, device=device)
    up, down = torch.randn(inner, hidden, device=device), torch.randn(hidden, inner, device=device)

    def pair() -> None:
        product(product(rows, up), down)

    pair()
    rates = []
    for _ in range(ROUNDS):
        _wait(device)
        start, pairs = time.perf_counter(), 0
        while time.perf_counter() - start < ROUND_S:
            pair()
            pairs += 1
            if pairs % 8 == 0:
                _wait(device)  # or a GPU's queue would hold more than the round
        _wait(device)
        rates.append(pairs * 4 * tokens * hidden * inner / (time.perf_counter() - start))
    return median(rates)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
