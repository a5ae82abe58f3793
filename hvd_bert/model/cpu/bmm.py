"""Products of many small fp32 matrices on the CPU, by numpy's BLAS.

torch gives them to MKL, which on an AMD core is slower at them than numpy's OpenBLAS (`benchmarks/cpu_kernels.py`).
OpenBLAS works on one matrix after the other, so that threads do not help: only a rank of one thread takes it.
"""

from __future__ import annotations

import os
from functools import cache

import numpy as np
import torch


def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes left [B, m, k] times right [B, k, n] to `out` [B, m, n]; all may be strided. No autograd. `out`."""
    if torch.get_num_threads() > 1 or not available():
        return torch.bmm(left, right, out=out)
    np.matmul(left.numpy(), right.numpy(), out=out.numpy())
    return out


@cache
def available() -> bool:
    """Whether numpy's BLAS is OpenBLAS, told to use one thread, and the CPU one where it was measured: AVX-512."""
    built = np.show_config(mode="dicts")
    library = built["Build Dependencies"]["blas"]["name"] if isinstance(built, dict) else ""
    cpu = torch.backends.cpu.get_cpu_capability()
    return "openblas" in library and cpu.startswith("AVX512") and openblas_threads() == 1


def openblas_threads() -> int:
    """OpenBLAS's threads, as it reads them when numpy is imported."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        said = os.environ.get(name, "").split(",")[0]
        if said.isdecimal() and int(said) > 0:
            return int(said)
    return len(os.sched_getaffinity(0))
