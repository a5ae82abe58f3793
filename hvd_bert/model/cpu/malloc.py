"""Keeps freed memory in the process and asks for huge pages; glibc returns large blocks to the system by default."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping
from pathlib import Path

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_GROW_BY = 256 << 20  # bytes per growth
_MADV_HUGEPAGE, _HUGE_PAGE, _PAGE = 14, 2 << 20, 4 << 10
_HUGE_HEAP = 4 << 30  # bytes of address space; only used pages take memory


def keep_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let malloc keep freed memory for the next step. Returns whether it does. GPU memory is torch's.

    Nothing changes if the user has set MALLOC_... variables, or with another C library or allocator.
    """
    if any(name.startswith("MALLOC_") for name in environ) or "LD_PRELOAD" in environ:
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return False
    # No separate mapping for a large tensor, no trimming of the heap, and growth in large pieces.
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _GROW_BY))
    kept = all(mallopt(name, value) == 1 for name, value in settings)
    if kept and not _reserving_counts_as_use():
        _use_huge_pages(libc)
    return kept


def _reserving_counts_as_use() -> bool:
    """Whether reserved memory counts as used: by `ulimit -v` or `-d`, or if the kernel does not overcommit."""
    policy = Path("/proc/sys/vm/overcommit_memory")
    strict = policy.exists() and policy.read_text().strip() == "2"
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return strict or any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _use_huge_pages(libc: ctypes.CDLL) -> None:
    """Ask for pages of 2 MiB for the start of the heap. Some kernels, as Debian's, give them only if asked.

    A step uses hundreds of MiB. docs/evidence/benchmarks.md has the cost of pages of 4 KiB.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.malloc(_HUGE_HEAP)
    if start:
        first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(first, (start + _HUGE_HEAP - first) // _PAGE * _PAGE, _MADV_HUGEPAGE)
        libc.free(start)  # it stays part of the heap
