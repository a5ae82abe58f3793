"""Attention with dropout within packed windows, for CPUs without the compiled kernel, in fp32 and bf16.

torch draws one random number per probability and stores three copies of the probabilities. Here 8 random bits decide
whether a probability is dropped, or 16 if 8 are not enough. In fp32, 5 bytes per probability are stored. The random
bits come from torch's own generator, so a checkpoint's random state includes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEVELS = 2**16  # dropout probabilities are rounded to multiples of 1 / LEVELS
WORD_BITS = 64
BITS_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def keep_mask(shape: torch.Size, p: float) -> Tensor:
    """Draw a dropout mask, int8 [shape]: 0 with probability `p` (rounded), else -1, which has all bits set.

    Uses torch's default CPU generator. The mask is as exact as with 16 random bits per element, but only one element in
    256 needs more than 8 bits.
    """
    count = shape.numel()
    high, low = divmod(drop_threshold(p), 256)
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2 ** (WORD_BITS - 1)), None)
    draws = words.view(torch.uint8)[:count].numpy()
    keep = torch.empty(shape, dtype=torch.bool)
    flat = keep.view(-1).numpy()
    np.greater(draws, high, out=flat)  # numpy compares small integers ten times as fast as torch
    undecided = np.flatnonzero(draws == high)
    flat[undecided] = torch.empty(len(undecided), dtype=torch.uint8).random_().numpy() >= low
    return keep.view(torch.int8).neg_()


def masked(values: Tensor, keep: Tensor, out: Tensor) -> Tensor:
    """Write `values` to `out`, with 0 where `keep` is 0. Returns `out`. torch itself would first widen `keep`."""
    bits = BITS_OF[values.dtype]
    np.bitwise_and(values.detach().view(bits).numpy(), keep.numpy(), out=out.view(bits).numpy())
    return out


def kept_scale(p: float) -> float:
    """Return the factor of elements that are not dropped: 1 / (1 - p) for the rounded p."""
    return LEVELS / (LEVELS - drop_threshold(p))


def drop_threshold(p: float) -> int:
    """Return how many of the LEVELS equally likely random values drop an element with probability `p`."""
    return min(round(p * LEVELS), LEVELS - 1)


def split_by_window(windows: list[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors [N, heads, head size] by window. Yields each window's views, [heads, T, head size].

    `windows`: tokens per window.
    """
    return zip(*(tensor.transpose(0, 1).split(windows, 1) for tensor in tensors), strict=True)


def local_mask(query: Tensor, window_size: int | None) -> Tensor | None:
    """Return which tokens of a window attend to each other, bool [T, T]; None if all do. `query`: [heads, T, size]."""
    length = query.shape[1]
    if window_size is None or length <= window_size + 1:
        return None
    positions = torch.arange(length, device=query.device)
    return (positions[:, None] - positions).abs() <= window_size


class Attention(torch.autograd.Function):
    """dropout(softmax(scaling q k^T)) v within each window; tensors are [N, heads, head size].

    A single function for all windows, so that products are written into the result and nothing is concatenated. The
    factors of scores and dropout multiply per-token tensors, which are smaller than the tensors of token pairs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: list[int],
        window_size: int | None,
        dropout: float,
        scaling: float,
    ) -> Tensor:
        query, key, value = query * scaling, key.detach(), value.detach()
        output = torch.empty_like(value, memory_format=torch.contiguous_format)
        scratch = _for_pairs(query, lengths)
        saved = []
        for q, k, v, out in split_by_window(lengths, query, key, value, output):
            scores, attended = torch.bmm(q, k.transpose(1, 2), out=_pairs(scratch, q)), local_mask(q, window_size)
            if attended is not None:
                scores.masked_fill_(~attended, float("-inf"))
            probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
            keep = keep_mask(probabilities.shape, dropout)
            torch.bmm(masked(probabilities, keep, out=scores), v, out=out)
            saved += [probabilities, keep]
        ctx.save_for_backward(query, key, value, *saved)
        ctx.lengths, ctx.scale, ctx.scaling = lengths, kept_scale(dropout), scaling
        return output.mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        gradients = [torch.empty_like(key, memory_format=torch.contiguous_format) for _ in range(3)]
        windows = split_by_window(ctx.lengths, query, key, value, gradient * ctx.scale, *gradients)
        first, second = _for_pairs(query, ctx.lengths), _for_pairs(query, ctx.lengths)
        for (q, k, v, g, of_q, of_k, of_v), probabilities, keep in zip(windows, saved[::2], saved[1::2], strict=True):
            of_probabilities = torch.bmm(g, v.transpose(1, 2), out=_pairs(first, q))
            masked(of_probabilities, keep, out=of_probabilities)
            of_scores = _pairs(second, q)  # holds the masked probabilities first
            torch.bmm(masked(probabilities, keep, out=of_scores).transpose(1, 2), g, out=of_v)
            torch._softmax_backward_data(of_probabilities, probabilities, -1, probabilities.dtype, grad_input=of_scores)
            torch.bmm(of_scores, k, out=of_q)
            torch.bmm(of_scores.transpose(1, 2), q, out=of_k)
        gradients[0].mul_(ctx.scaling)
        return *gradients, None, None, None, None


def _for_pairs(query: Tensor, lengths: list[int]) -> Tensor:
    """Allocate memory for one number per head and token pair of the longest window. All windows reuse it, so it stays
    in the CPU's cache."""
    return query.new_empty(query.shape[1] * max(lengths) ** 2)


def _pairs(memory: Tensor, tokens: Tensor) -> Tensor:
    """Return a view [heads, T, T] of the start of `memory`, with arbitrary content. `tokens`: [heads, T, head size]."""
    heads, length, _ = tokens.shape
    return memory[: heads * length**2].view(heads, length, length)
