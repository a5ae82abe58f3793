"""Products of many small matrices on the CPU, in fp32 with numpy's BLAS.

torch uses MKL for fp32, which is slower for them on AMD cores than numpy's OpenBLAS (`benchmarks/cpu_kernels.py`).
OpenBLAS processes one matrix after the other, so threads do not help; only ranks with one thread use it. For bf16,
torch uses oneDNN.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import torch


def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write left [B, m, k] times right [B, k, n] to `out` [B, m, n] and return it. All may be strided. No autograd."""
    if left.dtype != torch.float32 or torch.get_num_threads() > 1 or not available():
        return torch.bmm(left, right, out=out)
    return by_numpy(left, right, out)


def by_numpy(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the product of matrices, or of B matrices, to `out` and return it."""
    # Tensor.numpy() would make a weight's storage fixed in size, but FSDP frees it between two uses.
    np.matmul(np.from_dlpack(left.detach()), np.from_dlpack(right.detach()), out=out.numpy())
    return out


@cache
def available() -> bool:
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
