"""Dropout for the CPU: one draw of 64 random bits decides on four elements.

torch draws a number for each element; with BERT's p = 0.1 that took a tenth of a training step on one thread. The
numbers come of torch's own generator, so a checkpoint's random state holds for them too. GPUs keep torch's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

LEVELS = 2**16  # p is rounded to a multiple of 1 / LEVELS
WORD_BITS = 64


def random_words(count: int) -> torch.Tensor:
    """Random bits for `count` elements: int64 [ceil(count / 4)], from torch's default generator of the CPU."""
    return torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2 ** (WORD_BITS - 1)), None)


def keep_factors(words: torch.Tensor, shape: torch.Size, p: float) -> torch.Tensor:
    """float32 [shape]: 0 with probability `p`, else 1 / (1 - p), p rounded; a function of `words` alone."""
    dropped = min(round(p * LEVELS), LEVELS - 1)
    numbers = words.view(torch.int16)[: shape.numel()].view(shape)
    factors = torch.ge(numbers, dropped - LEVELS // 2, out=torch.empty(shape))  # straight into floats: one pass
    return factors.mul_(LEVELS / (LEVELS - dropped))


def serves(tensor: torch.Tensor) -> bool:
    """Whether these functions take it: others are left to torch."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, p: float) -> torch.Tensor:
        words = random_words(values.numel())
        ctx.save_for_backward(words)  # 2 bytes for an element; the factors, made again from them, would be 4
        ctx.p = p
        return keep_factors(words, values.shape, p).mul_(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (words,) = ctx.saved_tensors
        return keep_factors(words, gradient.shape, ctx.p).mul_(gradient), None


class Dropout(nn.Dropout):
    """nn.Dropout: the same interface, other random numbers for float32 on the CPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` with a share p of its elements zeroed and the others scaled up, in training; else `input`."""
        if not (self.training and self.p and serves(input)):
            return super().forward(input)
        result: torch.Tensor = _Dropout.apply(input, self.p)  # type: ignore[no-untyped-call]
        return result
