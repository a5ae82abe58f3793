"""Dropout for the CPU: 8 random bits per element, 16 where these do not decide; also in one pass with the residual and
the layer norm after it, by a compiled operation of fused.cpp.

torch draws one number per element; with BERT's p = 0.1, this took a tenth of a training step on one thread. The random
bits come from torch's own generator, so a checkpoint's random state covers them. GPUs use torch's kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hvd_bert.model.cpu import kernels
from hvd_bert.model.cpu.fused import MULTIPLE, AddNorm, in_shape

LEVELS = 2**16  # p is rounded to a multiple of 1 / LEVELS
WORD_BITS = 64
BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def keep_mask(shape: torch.Size, p: float) -> torch.Tensor:
    """int8 [shape]: 0 with probability `p` (rounded), else -1, all bits set; from torch's default CPU generator.

    One element in 256 needs 8 more bits than the first 8. The result is as exact as with 16 bits for each.
    """
    count = shape.numel()
    high, low = divmod(dropped_of(p), 256)
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2 ** (WORD_BITS - 1)), None)
    draws = words.view(torch.uint8)[:count].numpy()
    keep = torch.empty(shape, dtype=torch.bool)
    flat = keep.view(-1).numpy()
    np.greater(draws, high, out=flat)  # numpy compares small integers ten times as fast as torch
    undecided = np.flatnonzero(draws == high)
    flat[undecided] = torch.empty(len(undecided), dtype=torch.uint8).random_().numpy() >= low
    return keep.view(torch.int8).neg_()


def masked(values: torch.Tensor, keep: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write `values`, 0 where `keep` is 0, to `out`, which may be `values`. torch would copy `keep` to a wider type."""
    bits = BITS_OF[values.dtype]
    np.bitwise_and(values.detach().view(bits).numpy(), keep.numpy(), out=out.view(bits).numpy())
    return out


def kept_scale(p: float) -> float:
    """The factor of the kept elements: 1 / (1 - p), p rounded."""
    return LEVELS / (LEVELS - dropped_of(p))


def dropped_of(p: float) -> int:
    """Threshold (of LEVELS) below which an element is dropped."""
    return min(round(p * LEVELS), LEVELS - 1)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, p: float) -> torch.Tensor:
        keep = keep_mask(values.shape, p)
        ctx.save_for_backward(keep)
        ctx.scale = kept_scale(p)
        return masked(values, keep, torch.empty_like(values)).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (keep,) = ctx.saved_tensors
        return masked(gradient, keep, torch.empty_like(gradient)).mul_(ctx.scale), None


class Dropout(nn.Dropout):
    """nn.Dropout with other random numbers for float32 and bfloat16 on the CPU."""

    @staticmethod
    def of(layer: nn.Dropout) -> Dropout:
        """In place of `layer`."""
        return Dropout(layer.p, layer.inplace)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """In training, zero a share p of the elements and scale up the others; otherwise return `input`."""
        own = input.device.type == "cpu" and kernels.chosen(input.dtype).dropout == kernels.OWN
        if not (self.training and self.p and own):
            return super().forward(input)
        result: torch.Tensor = _Dropout.apply(input, self.p)  # type: ignore[no-untyped-call]
        return result


class AddAndNorm(nn.Module):
    """BERT's output layers: dense, dropout, residual, layer norm; the last three in one pass where it is compiled."""

    def __init__(self, dense: nn.Module, dropout: nn.Dropout, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.dense, self.dropout, self.LayerNorm = dense, dropout, norm

    @staticmethod
    def of(layer: Any) -> AddAndNorm:
        """In place of transformers' `layer`."""
        return AddAndNorm(layer.dense, layer.dropout, layer.LayerNorm)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """hidden_states [..., size of dense], input_tensor [..., size] -> [..., size]."""
        rows, norm, size = self.dense(hidden_states), self.LayerNorm, input_tensor.shape[-1]
        precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input_tensor.dtype
        chosen = input_tensor.device.type == "cpu" and kernels.chosen(precision).norm == kernels.FUSED
        in_fp32 = isinstance(norm, nn.LayerNorm) and norm.weight.dtype == input_tensor.dtype == torch.float32
        fits = in_fp32 and size % MULTIPLE == 0
        if not (self.training and chosen and fits and input_tensor.numel()):
            result: torch.Tensor = norm(self.dropout(rows) + input_tensor)
            return result
        tensors = (rows.reshape(-1, size), input_tensor.reshape(-1, size), norm.weight, norm.bias)
        output = AddNorm.apply(*tensors, norm.eps, dropped_of(self.dropout.p))  # type: ignore[no-untyped-call]
        return in_shape(output, input_tensor.shape)
