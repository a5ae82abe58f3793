"""Dropout for the CPU: one draw of 64 random bits decides on four elements.

torch draws a number for each element; with BERT's p = 0.1 that took a tenth of a training step on one thread. The
numbers come of torch's own generator, so a checkpoint's random state holds for them too. GPUs keep torch's kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

LEVELS = 2**16  # p is rounded to a multiple of 1 / LEVELS
WORD_BITS = 64


def keep_mask(shape: torch.Size, p: float) -> torch.Tensor:
    """int8 [shape]: 0 with probability `p`, rounded, else 1; by torch's default generator of the CPU."""
    count = shape.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2 ** (WORD_BITS - 1)), None)
    keep = torch.empty(shape, dtype=torch.bool)
    # numpy's comparison of small integers takes a tenth of the time of torch's.
    np.greater_equal(words.view(torch.int16)[:count].numpy(), _dropped(p) - LEVELS // 2, out=keep.view(-1).numpy())
    return keep.view(torch.int8)  # which torch multiplies faster than bool


def kept_scale(p: float) -> float:
    """What is kept is multiplied by this: 1 / (1 - p), p rounded."""
    return LEVELS / (LEVELS - _dropped(p))


def _dropped(p: float) -> int:
    return min(round(p * LEVELS), LEVELS - 1)


def serves(tensor: torch.Tensor) -> bool:
    """Whether these functions take it: others are left to torch."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, p: float) -> torch.Tensor:
        keep = keep_mask(values.shape, p)
        ctx.save_for_backward(keep)
        ctx.scale = kept_scale(p)
        return (values * keep).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (gradient * keep).mul_(ctx.scale), None


class Dropout(nn.Dropout):
    """nn.Dropout: the same interface, other random numbers for float32 on the CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` with a share p of its elements zeroed and the others scaled up, in training; else `input`."""
        if not (self.training and self.p and serves(input)):
            return super().forward(input)
        result: torch.Tensor = _Dropout.apply(input, self.p)  # type: ignore[no-untyped-call]
        return result
