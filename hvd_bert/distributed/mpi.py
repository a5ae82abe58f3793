"""Initialize MPI, after checking that the launcher and Horovod use the same MPI library."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from hvd_bert.distributed.interfaces import avoid_inner_networks
from hvd_bert.distributed.launch import ASKS_MPI, WITH_PMIX, Launcher, LaunchError, mpi_ranks
from hvd_bert.errors import UserError


def join(launcher: Launcher) -> Any:
    """Initialize MPI, and return an mpi4py communicator of all ranks. Call before `hvd.init`.

    Raises UserError if MPI does not fit the launcher (`check_library`), or does not provide THREAD_MULTIPLE.

    If Horovod 0.28.1 initialized MPI, it would also finalize it when the first rank leaves, while other ranks still use
    it (segmentation faults). mpi4py finalizes it when the process ends.
    """
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI

    check_library(launcher, os.environ, MPI.Get_library_version())
    avoid_inner_networks(os.environ)
    if not torch.cuda.is_available():
        # Open MPI polls while it waits, so on CPUs Horovod's thread would take the core from the rank's training.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise UserError(
            "This MPI does not provide THREAD_MULTIPLE, which Horovod's background thread needs. Use an MPI built with"
            " it, or `horovodrun --gloo`."
        )
    return MPI.COMM_WORLD.Dup()  # keeps these messages apart from Horovod's


def library_name() -> str:
    """Return the name and version of the initialized MPI library, such as Open MPI v4.1.4."""
    from mpi4py import MPI

    return _short(MPI.Get_library_version())


def _short(mpi: str) -> str:
    return " ".join(mpi.splitlines()[0].partition(",")[0].split())


def check_size(launcher: Launcher, horovod_size: int, environ: Mapping[str, str]) -> None:
    """Raise UserError if Horovod's world size differs from the launcher's: each rank might train in a world of one."""
    if launcher.name == ASKS_MPI and horovod_size == 1:
        raise UserError(  # not a LaunchError, which only the launcher's rank 0 reports
            f"{mpi_ranks(environ)[0]} is set: a launcher of MPI started this process. But it set no size, and"
            " Horovod sees a world of one. Start with the launcher of the MPI that Horovod was built with. To train"
            " in this process alone: --strategy none."
        )
    if launcher.size is None or launcher.size == horovod_size:
        return
    rebuild = "Use the launcher of the MPI that Horovod was built with, or rebuild it with this one (env/setup.sh)."
    hint = WITH_PMIX if launcher.name == "srun" else rebuild
    raise LaunchError(
        f"{launcher.name} started {launcher.size} processes, but Horovod sees a world of {horovod_size}: they cannot"
        f" find each other, and each would train alone. {hint}"
    )


def check_library(launcher: Launcher, environ: Mapping[str, str], mpi: str) -> None:
    """Raise LaunchError if MPI_Init would abort this process. `check_size` detects other mistakes later.

    Open MPI aborts under srun without PMI. MPICH aborts under Open MPI's mpirun. `mpi`: the MPI library's version text.
    """
    has_pmi = any(name.startswith(("PMIX_", "PMI_", "PMI2_")) for name in environ)
    if mpi.startswith("Open MPI") and launcher.name == "srun" and launcher.size != 1 and not has_pmi:
        raise LaunchError(
            f"srun started {launcher.size} processes without PMIx: they cannot find each other, and each would be a"
            f" world of one. {WITH_PMIX}"
        )
    if re.search(r"MPICH|MVAPICH|Intel\(R\) MPI", mpi) and "OMPI_COMM_WORLD_SIZE" in environ:
        raise LaunchError(
            f"The mpirun of Open MPI started this job, but Horovod and mpi4py use {_short(mpi)}: the processes cannot"
            " find each other. Use the mpirun of that MPI, or load Open MPI's module and rerun `bash env/setup.sh`."
        )
