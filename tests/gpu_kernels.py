"""Run a command with the attention kernels that it would use on an A100, computed on the CPU.

    python gpu_kernels.py MODULE_OR_FILE ARGUMENTS...      adds a line per kernel and dtype to the file $GPU_KERNELS

This module implements the torch operations (flash, memory-efficient) that these kernels call and a CPU build lacks.
The dropout mask depends only on the seed that the forward pass returns, as on a GPU.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal import sdpa
from torch.nn.attention import SDPBackend

from hvd_bert.model import attention

HALF = (torch.float16, torch.bfloat16)
LIMITS = True  # whether flash refuses fp32 and head sizes that are not multiples of 8
OVERRIDES = torch.library.Library("aten", "IMPL")


def check(limits: bool, cu: Tensor, cu_k: Tensor, longest: tuple[int, int], *tensors: Tensor) -> None:
    """Assert that the kernels accept the arguments. `limits`: also check dtypes and head sizes, as flash does."""
    assert len({tensor.shape for tensor in tensors}) == 1 and {tensor.stride(-1) for tensor in tensors} == {1}
    assert cu.dtype == cu_k.dtype == torch.int32 and cu.equal(cu_k)
    lengths = cu.diff().tolist()
    assert int(cu[0]) == 0 and int(cu[-1]) == len(tensors[0]) and min(lengths) >= 0  # padding: empty windows at the end
    assert longest[0] == longest[1] >= max(lengths)
    if limits and LIMITS:
        assert tensors[0].dtype in HALF and tensors[0].shape[-1] % 8 == 0


def parts(cu: Tensor, dropout: float, seed: Tensor, window_size: Any, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield, per window, its rows as a slice, dropout factors, a mask of distant tokens, and the tensors in fp32.

    A dropout factor is 0 or 1 / (1 - `dropout`). The tensors have the shape [heads, T, head size].
    """
    generator = torch.Generator().manual_seed(int(seed))
    for start, end in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        heads, length = tensors[0].shape[1], end - start
        keep = (torch.rand(heads, length, length, generator=generator) >= dropout) / (1 - dropout)
        far = torch.zeros(length, length, dtype=torch.bool)
        if window_size is not None and window_size >= 0:
            far = (torch.arange(length)[:, None] - torch.arange(length)).abs() > window_size
        yield slice(start, end), keep, far, *(t[start:end].transpose(0, 1).float() for t in tensors)


def probabilities(q: Tensor, k: Tensor, far: Tensor, scale: float | None) -> Tensor:
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(far, float("-inf")).softmax(-1)


@torch.autocast("cpu", enabled=False)  # autocast does not affect a GPU's kernels
def forward(
    query: Tensor, key: Tensor, value: Tensor, cu: Tensor, dropout: float, scale: float | None, window_size: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.randint(2**62, ()) if dropout else torch.zeros((), dtype=torch.int64)
    output = torch.empty_like(value)
    for rows, keep, far, q, k, v in parts(cu, dropout, seed, window_size, query, key, value):
        output[rows] = (probabilities(q, k, far, scale) * keep @ v).transpose(0, 1)
    return output, query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32), seed


@torch.autocast("cpu", enabled=False)
def backward(
    upstream: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu: Tensor,
    dropout: float,
    scale: float | None,
    seed: Tensor,
    window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    for rows, keep, far, g, q, k, v in parts(cu, dropout, seed, window_size, upstream, query, key, value):
        p = probabilities(q, k, far, scale)
        of_p = g @ v.transpose(1, 2) * keep
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * factor
        for gradient, of in zip(found, (of_scores @ k, of_scores.mT @ q, (p * keep).mT @ g), strict=True):
            gradient[rows] = of.transpose(0, 1)
    return found


def flash_forward(q, k, v, cu, cu_k, max_q, max_k, p, causal, debug, *, scale=None, window_size_left=None, **_):
    assert not causal and not debug
    check(True, cu, cu_k, (max_q, max_k), q, k, v)
    output, sums, seed = forward(q, k, v, cu, p, scale, window_size_left)
    state = torch.stack([seed, torch.zeros_like(seed)]).to(torch.uint64)  # shape and dtype as on a GPU
    return output, sums, state, torch.empty((), dtype=torch.uint64), q.new_empty(0)


def flash_backward(
    g, q, k, v, out, sums, cu, cu_k, max_q, max_k, p, causal, seed, unused, *, scale=None, window_size_left=None, **_
):
    return backward(g, q, k, v, cu, p, scale, seed[0] if p else torch.zeros(()), window_size_left)


def efficient_forward(q, k, v, bias, cu, cu_k, max_q, max_k, p, mask_type, sums=False, *, scale=None, **_):
    assert bias is None and mask_type == 0
    check(False, cu, cu_k, (max_q, max_k), q[0], k[0], v[0])
    output, found, seed = forward(q[0], k[0], v[0], cu, p, scale)
    return output[None], found[None], seed, torch.zeros((), dtype=torch.int64), max_q, max_k


def efficient_backward(
    g, q, k, v, bias, out, cu, cu_k, max_q, max_k, sums, p, seed, offset, mask_type, needs_bias, *, scale=None, **_
):
    return *(t[None] for t in backward(g[0], q[0], k[0], v[0], cu, p, scale, seed)), torch.empty(0)


@functools.cache
def register() -> None:
    """Register the operations with torch."""
    for function in (flash_forward, flash_backward, efficient_forward, efficient_backward):
        kind, direction = function.__name__.split("_")
        kernel = torch.autocast("cpu", enabled=False)(function)  # autocast does not affect a GPU's kernels
        OVERRIDES.impl(f"_{kind}_attention_{direction}", kernel, "CPU")


def install(file: str) -> None:
    """Make the package choose kernels as on an A100, and append each chosen kernel and dtype to `file` once."""
    register()
    sdpa._select_sdp_backend = lambda query, *_: (  # for jagged tensors
        SDPBackend.FLASH_ATTENTION if query.dtype in HALF else SDPBackend.EFFICIENT_ATTENTION
    )
    chosen, seen = attention.choose, set[Any]()

    def choose(_: Any, dtype: Any, *rest: Any) -> Any:
        kernel = chosen(torch.device("cuda"), dtype, *rest)
        if (kernel, dtype) not in seen:
            seen.add((kernel, dtype))
            with open(file, "a", encoding="utf-8") as lines:
                lines.write(f"{kernel.__name__} {str(dtype).removeprefix('torch.')}\n")
        return kernel

    attention.choose = choose
    attention.gpu_kernels = lambda _: frozenset({attention.by_flash, attention.by_efficient})  # type: ignore[assignment]


if __name__ == "__main__":
    install(os.environ["GPU_KERNELS"])
    del sys.argv[0]
    if sys.argv[0].endswith(".py"):
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
