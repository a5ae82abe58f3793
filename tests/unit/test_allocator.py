"""Memory is kept where nobody has said otherwise; and it is kept: the next step's tensors touch no new page."""

from __future__ import annotations

import resource

import pytest
import torch

from hvd_bert.allocator import keep_memory


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "LD_PRELOAD"])
def test_settings_of_the_user_stand(name):
    assert not keep_memory({"PATH": "/bin", name: "1"})


def test_freed_memory_is_used_again():
    if not keep_memory({}):
        pytest.skip("this C library has no mallopt")

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.ones(1 << 20) for _ in range(8)]
        assert all(tensor[0] == 1 for tensor in tensors)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(3):
        faults()
    assert min(faults() for _ in range(3)) < 8  # of 8192 pages of 4 KiB, or 16 of 2 MiB
