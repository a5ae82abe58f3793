"""Stops a rank whose launcher was killed: it would continue, and keep its GPU and the lock of its output folder.

env/build_horovod.sh builds a horovodrun that passes signals on to its ranks over MPI. Another one becomes the shell
`/bin/sh -c "mpirun ..."`, and a signal ends that shell only: mpirun and the ranks on all its hosts continue. So the
ranks of mpirun's host watch that shell. All ranks watch the process that started them, for torchrun's would outlive it,
too. Slurm ends its tasks itself, and so do horovodrun's processes under Gloo.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import psutil

CHECK_S = 1.0
_NOT_WATCHED = ("none", "srun")

Link = tuple[psutil.Process, psutil.Process]  # a process and its parent


def start(launcher: str) -> None:
    """From now on, send this process SIGUSR1 when its launcher, of that name, has ended. All ranks stop then.

    Not SIGTERM, which the launcher may have passed on before: a second one ends a run that is still saving.
    """
    links = [] if launcher in _NOT_WATCHED else _links()
    if links:
        threading.Thread(target=_run, args=(links,), name="launcher watch", daemon=True).start()


def _links() -> list[Link]:
    """The links to the launcher: this process's parent, and the shell that horovodrun became.

    No others, because the parent of mpirun itself may end (nohup).
    """
    rank = psutil.Process()
    try:
        above = rank.parents()
    except psutil.Error:  # where /proc hides the processes of others
        return []
    return list(pairwise([rank, *above[:1]])) + [link for link in pairwise(above) if _became_shell(link[1])]


def _became_shell(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        words = process.cmdline()
        return len(words) == 3 and words[:2] == ["/bin/sh", "-c"] and words[2].startswith("mpirun ")
    return False


def _run(links: Sequence[Link]) -> None:
    while not any(_is_cut(*link) for link in links):
        time.sleep(CHECK_S)
    with suppress(OSError):  # nobody may read this process's output any more
        os.write(2, b"hvd_bert: the launcher was killed: stopping this rank\n")
    os.kill(os.getpid(), signal.SIGUSR1)


def _is_cut(process: psutil.Process, parent: psutil.Process) -> bool:
    """Whether a process has another parent now: the kernel hands it over when its parent ends."""
    try:
        return bool(process.ppid() != parent.pid)
    except psutil.NoSuchProcess:
        return True
