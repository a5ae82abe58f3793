"""Linear layers on the CPU with oneDNN, in fp32, forward and backward.

torch uses MKL for fp32 matrix products, which reaches only half the speed on AMD cores: on one thread of a Zen 5, 77 to
106 GFLOP/s, where oneDNN reached 179 to 218 (`benchmarks/cpu_kernels.py`). The precision is the same; only the order
of the sums differs.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


def available() -> bool:
    """Whether torch and the CPU support the faster product: oneDNN's with AVX-512."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # not public; torch.compile's CPU back end uses it
    )


def keep_few_kernels() -> None:
    """Let oneDNN keep the kernels of about one micro-batch. Call this before the first product.

    All layers of a model use the same kernels, so only the first one has to wait for them. Without kept kernels, a step
    in bf16 took a quarter longer. The next batch has other lengths and rarely uses them again. A kernel takes half a
    megabyte and fragments the heap: with torch's default, 1024 in each of two caches, a rank grew to 11 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")  # torch's own cache above oneDNN's


def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """rows [N, in] times weight [out, in] transposed, plus bias [out]: [N, out]. Either may be a transposed view."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return result


def _gradient_of_weight(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """gradient [N, out] transposed times rows [N, in]: [out, in]."""
    if gradient.shape[1] > rows.shape[1]:  # torch copies the first operand if it is a view: pass the narrower one
        return product(rows.t(), gradient.t()).t().contiguous()
    return product(gradient.t(), rows.t())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(gradient, weight.t()) if of_rows else None,
            _gradient_of_weight(gradient, rows) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


class Linear(nn.Linear):
    """nn.Linear with oneDNN's product for float32 on the CPU; interface and parameters are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in] -> [..., out]."""
        supported = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32
        if not supported or torch.is_autocast_enabled("cpu") or not input.numel() or not available():
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        result: torch.Tensor = _Linear.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result.view(*input.shape[:-1], self.out_features)
