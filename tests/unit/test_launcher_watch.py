"""A rank stops when its launcher, the process that started it, has been killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import psutil
import pytest
from processes import started

from hvd_bert.distributed import signals

RANK = """
import signal
from hvd_bert.distributed import signals

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signals.CHECK_S = 0.05
signals.watch_launcher("mpirun")
print("watches", flush=True)
signal.sigwait({signal.SIGUSR1})
print("stopped", flush=True)
"""


def test_launcher_is_killed() -> None:
    launcher = ["sh", "-c", f"'{sys.executable}' -c '{RANK}'; exit $?"]  # some shells become their last command
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with started(launcher, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "watches\n"
        (rank,) = psutil.Process(process.pid).children()
        process.kill()
        assert process.stdout.readline() == "stopped\n"
        assert "hvd_bert: the launcher was killed: stopping this rank" in process.stderr.read()
        rank.wait(60)


@pytest.mark.parametrize("launcher", ["none", "srun"])
def test_no_launcher_to_watch(launcher: str) -> None:
    before = threading.enumerate()
    signals.watch_launcher(launcher)
    assert threading.enumerate() == before
