"""Keeps freed memory in the process; by default, glibc returns large blocks to the system after each step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_GROW_BY = 256 << 20  # bytes


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Make malloc keep freed memory for the next step; return whether it does. For CPUs only: torch manages GPU memory.

    Nothing changes if the user has set MALLOC_... variables, or with another C library or allocator.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "LD_PRELOAD" in environ:
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No separate mapping for a large tensor, no trimming of the heap, and growth in large pieces.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _GROW_BY))
    return all(mallopt(name, value) == 1 for name, value in settings)
