"""Matrix products and linear layers on the CPU by oneDNN or by numpy's OpenBLAS, in fp32.

torch uses MKL for fp32, which has only half the speed on AMD cores. The precision is the same; only the order of the
sums differs. In bf16, torch uses oneDNN itself.
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
    """Limit oneDNN's caches to the kernels of about one micro-batch. Call this before the first product.

    All layers of a model share kernels, so a step in bf16 takes a quarter longer without caches. The next micro-batch
    has other lengths and rarely uses the kernels again. A kernel takes half a megabyte and fragments the heap: with
    torch's default, 1024 in each of two caches, a rank grew to 11 GB.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")  # torch's own cache above oneDNN's


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [N, in] times weight [out, in] transposed, plus bias [out]: [N, out]. Either may be a transposed view."""
    if kernels.active(torch.float32).linear == ONEDNN:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return result
    result = rows.new_empty(len(rows), len(weight))
    # Tensor.numpy() would make a weight's storage fixed in size, but FSDP frees it between two uses.
    np.matmul(np.from_dlpack(rows.detach()), np.from_dlpack(weight.detach().t()), out=result.numpy())
    return result if bias is None else result.add_(bias.detach())


def _weight_gradient(gradient: Tensor, rows: Tensor) -> Tensor:
    """gradient [N, out] transposed times rows [N, in]: [out, in]."""
    # oneDNN copies the first operand: pass the narrower one.
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
        """Make a layer with the parameters of `layer`."""
        made = Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        """input [..., in] -> [..., out]."""
        if self._is_fused(input):
            result: Tensor = LinearInBf16.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return result
        supported = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32
        own = supported and kernels.active(torch.float32).linear != TORCH
        if not own or torch.is_autocast_enabled("cpu") or not input.numel():
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        result = _Linear.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        # No view, as in torch's linear layers: FSDP would lose the gradients of an in-place operation on a view.
        return torch.ops.aten._unsafe_view(result, (*input.shape[:-1], self.out_features))  # type: ignore[no-any-return]

    def _is_fused(self, input: Tensor) -> bool:
        in_bf16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if not in_bf16 or input.device.type != "cpu" or kernels.active(torch.bfloat16).linear != FUSED:
            return False
        fits = not (self.in_features % MULTIPLE or self.out_features % MULTIPLE) and input.numel() > 0
        trained = self.weight.requires_grad  # a frozen weight needs fewer products
        return fits and trained and self.weight.is_contiguous() and self.weight.dtype == torch.float32
