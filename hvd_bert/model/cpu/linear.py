"""Matrix products and linear layers on the CPU that are faster than torch's, in fp32.

torch uses MKL for fp32, which reaches only half the speed on AMD cores: on one thread of a Zen 5, 77 to 106 GFLOP/s,
where oneDNN reached 179 to 218 (`benchmarks/cpu_kernels.py`). With AVX2 only, oneDNN is no faster than MKL, and numpy's
OpenBLAS by a tenth. OpenBLAS is also faster for many small matrices. It processes one matrix after the other, so
threads do not help; only ranks with one thread use it. The precision is the same; only the order of the sums differs.

In bf16, torch uses oneDNN itself, and autocast casts each weight once per micro-batch (0.4 % of a step).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

_replaced = True


@contextmanager
def replaced_by_torchs() -> Iterator[None]:
    """Inside, all layers use torch's own product, which torch's tools can follow."""
    global _replaced
    _replaced = False
    try:
        yield
    finally:
        _replaced = True


def available() -> bool:
    """Whether there is a faster product than torch's."""
    return has_onednn() or (torch.get_num_threads() == 1 and numpy_is_faster())


def has_onednn() -> bool:
    """Whether torch and the CPU support oneDNN's product with AVX-512."""
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
    if has_onednn():
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return result
    result = by_numpy(rows, weight.t(), rows.new_empty(len(rows), len(weight)))
    return result if bias is None else result.add_(bias.detach())


def _gradient_of_weight(gradient: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """gradient [N, out] transposed times rows [N, in]: [out, in]."""
    if has_onednn() and gradient.shape[1] > rows.shape[1]:  # it copies the first operand: pass the narrower one
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
    """nn.Linear with a faster product for float32 on the CPU; interface and parameters are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in] -> [..., out]."""
        supported = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32
        if not (supported and _replaced) or torch.is_autocast_enabled("cpu") or not input.numel() or not available():
            return super().forward(input)
        rows = input.reshape(-1, self.in_features)
        result: torch.Tensor = _Linear.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result.view(*input.shape[:-1], self.out_features)


def batched_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write left [B, m, k] times right [B, k, n] to `out` [B, m, n] and return it. All may be strided. No autograd."""
    if left.dtype != torch.float32 or torch.get_num_threads() > 1 or not numpy_is_faster():
        return torch.bmm(left, right, out=out)
    return by_numpy(left, right, out)


def by_numpy(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the product of matrices, or of B matrices, to `out` and return it."""
    # Tensor.numpy() would make a weight's storage fixed in size, but FSDP frees it between two uses.
    np.matmul(np.from_dlpack(left.detach()), np.from_dlpack(right.detach()), out=out.numpy())
    return out


@cache
def numpy_is_faster() -> bool:
    """Whether numpy's BLAS is OpenBLAS with one thread, and the CPU has AVX2 or AVX-512, for which it was measured."""
    built = np.show_config(mode="dicts")
    library = built["Build Dependencies"]["blas"]["name"] if isinstance(built, dict) else ""
    cpu = torch.backends.cpu.get_cpu_capability()
    return "openblas" in library and cpu.startswith(("AVX2", "AVX512")) and openblas_threads() == 1


def openblas_threads() -> int:
    """The number of threads that OpenBLAS reads from the environment when numpy is imported."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "").split(",")[0]
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return len(os.sched_getaffinity(0))
