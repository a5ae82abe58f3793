"""Waiting for Horovod's operations without occupying a core."""

from __future__ import annotations

import time
from typing import Any

PAUSE_S = 5e-5


def pause_between_polls() -> None:
    """Replace Horovod's `synchronize`, by which all its operations wait, with one that sleeps between two polls.

    Horovod 0.28 polls in a loop (WaitAndClear in handle_manager.cc) and has no setting for it. On CPUs it takes that
    time from its own thread, which sends the gradients, and from other ranks on the same cores. Not for MPI, whose
    thread polls as well: there the pauses cost more than they free (tests of four ranks on two cores: Gloo 72 to 41 s,
    MPI 50 to 63 s).
    """
    import horovod.torch as hvd
    from horovod.torch import functions, mpi_ops, optimizer

    wait = mpi_ops.synchronize
    if wait.__module__ == __name__:  # a later world of Horovod elastic
        return

    def synchronize(handle: int) -> Any:
        while not mpi_ops.poll(handle):
            time.sleep(PAUSE_S)
        return wait(handle)

    for module in (hvd, functions, mpi_ops, optimizer):
        if hasattr(module, "synchronize"):
            module.synchronize = synchronize
