"""What every command does to start quickly: it imports large libraries late, and with the garbage collector paused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Around large imports, in a command's entry point only: the collector would search them for garbage in vain.

    What was imported is never collected later either. For torch and transformers this saves 2 s of CPU time per
    process, half of it at exit (benchmarks/startup.py).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
