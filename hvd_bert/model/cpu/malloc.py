"""Keeps freed memory in the process, and requests huge pages. By default, glibc returns large blocks to the system."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_GROW_BY = 256 << 20  # bytes by which the heap grows
_MADV_HUGEPAGE, _HUGE_PAGE, _PAGE = 14, 2 << 20, 4 << 10
_HUGE_HEAP = 4 << 30  # bytes of address space; unused pages take no memory


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Make malloc keep freed memory for the next step. Returns whether this succeeded.

    Changes nothing if the environment has MALLOC_... variables or LD_PRELOAD, or if the C library is not glibc.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "LD_PRELOAD" in environ:
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return False
    # No separate mappings for large tensors, no trimming of the heap, and growth in large steps.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _GROW_BY))
    kept = all(mallopt(name, value) == 1 for name, value in settings)
    if kept and not _reserving_counts_as_use():
        _use_huge_pages(libc)
    return kept


def _reserving_counts_as_use() -> bool:
    """Return whether reserved address space counts as used memory: with `ulimit -v` or `-d`, or without overcommit."""
    policy = Path("/proc/sys/vm/overcommit_memory")
    strict = policy.exists() and policy.read_text().strip() == "2"
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return strict or any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Request 2 MiB pages for the start of the heap. Some kernels, such as Debian's, provide them only on request.

    A step uses hundreds of MiB. docs/evidence/benchmarks.md has the cost of 4 KiB pages.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.malloc(_HUGE_HEAP)
    if start:
        first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(first, (start + _HUGE_HEAP - first) // _PAGE * _PAGE, _MADV_HUGEPAGE)
        libc.free(start)  # the address space remains part of the heap
