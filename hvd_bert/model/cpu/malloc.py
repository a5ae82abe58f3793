"""Memory that is kept: else glibc returns big blocks to the system after each step, to be zeroed for the next."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_GROW_BY = 256 << 20  # bytes


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have malloc keep what is freed, for the next step; whether it does. For CPUs: GPUs have torch's own allocator.

    Left alone where the user has settings of their own (MALLOC_...), or another C library or allocator.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "LD_PRELOAD" in environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No block of its own for a big tensor, nothing given back at the heap's end, and growth in large pieces.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _GROW_BY))
    return all(mallopt(name, value) == 1 for name, value in settings)
