"""Matrix products and linear layers on the CPU: by oneDNN or numpy's OpenBLAS in fp32, by the compiled kernel in bf16.

For fp32, torch uses MKL, which has only half the speed of these libraries on AMD cores. The precision is the same; only
the order of the sums differs.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.fused import MULTIPLE, LinearInBf16
from hvd_bert.model.cpu.kernels import FUSED, ONEDNN, TORCH


def keep_few_kernels() -> None:
    """Limit the caches of oneDNN kernels to about one micro-batch's kernels, by environment variables.

    Call this before the first product. The layers of a model share kernels, so without any cache a step in bf16 takes a
    quarter longer. But the next micro-batch has other lengths and rarely reuses kernels. A kernel takes half a megabyte
    and fragments the heap: with torch's default of 1024 kernels in each of two caches, a rank grew to 11 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")  # torch's own cache on top of oneDNN's


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute rows [N, in] times weight^T (weight: [out, in]) plus bias [out] -> [N, out], in fp32 without autograd.

    `rows` and `weight` may be transposed views.
    """
    if kernels.active(torch.float32).linear == ONEDNN:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return result
    result = rows.new_empty(len(rows), len(weight))
    # Tensor.numpy() would fix the size of a weight's storage, but FSDP frees this storage between two uses.
    np.matmul(np.from_dlpack(rows.detach()), np.from_dlpack(weight.detach().t()), out=result.numpy())
    return result if bias is None else result.add_(bias.detach())


def _weight_gradient(gradient: Tensor, rows: Tensor) -> Tensor:
    """Compute gradient^T times rows (gradient: [N, out], rows: [N, in]) -> [out, in]."""
    # oneDNN copies the first operand, so pass the narrower matrix first.
    if kernels.active(torch.float32).linear == ONEDNN and gradient.shape[1] > rows.shape[1]:
        return product(rows.t(), gradient.t()).t().contiguous()
    return product(gradient.t(), rows.t())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(gradient, weight.t()) if of_rows else None,
            _weight_gradient(gradient, rows) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


class Linear(nn.Linear):
    """nn.Linear with a faster product on the CPU, in fp32 and bf16."""

    @staticmethod
    def of(layer: nn.Linear) -> Linear:
        """Make a layer that shares the parameters of `layer`."""
        made = Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Map `input`, [..., in], to [..., out]."""
        if self._is_fused(input):
            result: Tensor = LinearInBf16.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return result
        supported = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32
        own = supported and kernels.active(torch.float32).linear != TORCH
        if not own or torch.is_autocast_enabled("cpu") or not input.numel():
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        result = _Linear.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        # Not a view, as in torch's linear layers: FSDP would lose gradients of in-place operations on a view.
        return torch.ops.aten._unsafe_view(result, (*input.shape[:-1], self.out_features))  # type: ignore[no-any-return]

    def _is_fused(self, input: Tensor) -> bool:
        in_bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if not in_bf16 or input.device.type != "cpu" or kernels.active(torch.bfloat16).linear != FUSED:
            return False
        fits = not (self.in_features % MULTIPLE or self.out_features % MULTIPLE) and input.numel() > 0
        trained = self.weight.requires_grad  # for frozen weights, torch computes fewer products
        return fits and trained and self.weight.is_contiguous() and self.weight.dtype == torch.float32
