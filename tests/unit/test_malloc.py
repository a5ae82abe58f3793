"""Freed memory is kept unless the user has other settings: the next step's tensors need no new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvd_bert.model.cpu.malloc import keep_memory

pytestmark = pytest.mark.slow


def test_settings_of_the_user_are_respected():
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "LD_PRELOAD"):
        assert not keep_memory({"PATH": "/bin", name: "1"})


COUNT = """
import resource, sys, torch
from hvd_bert.model.cpu.malloc import keep_memory

kept = keep_memory({}) if sys.argv[1] == "kept" else None
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(12 << 20) for _ in range(2)]  # more than glibc keeps by itself, 32 MiB each at most
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(10):  # until the heap has a place for each
    faults()
print(kept, min(faults() for _ in range(5)))
"""


def printed_by(program: str, *words: str) -> list[str]:
    """What a new process prints, which no variable of glibc keeps from its defaults."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    words = (sys.executable, "-c", program, *words)
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.split()


def test_freed_memory_is_reused():
    kept, faults = printed_by(COUNT, "kept")
    if kept != "True":
        pytest.skip("this C library has no mallopt")
    assert int(faults) == 0 < int(printed_by(COUNT, "plain")[1])
