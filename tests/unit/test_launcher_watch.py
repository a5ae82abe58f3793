"""A rank stops when its launcher has been killed: the process that started it, or the shell that horovodrun became."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from processes import started

from hvd_bert.distributed import signals

# Prints how many links it watches, and "stopped" at SIGUSR1.
RANK = """
import signal
from hvd_bert.distributed import signals

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signals.CHECK_S = 0.05
signals.watch_launcher("mpirun")
print(len(signals._links()), flush=True)
signal.sigwait({signal.SIGUSR1})
print("stopped", flush=True)
"""


@contextmanager
def launched(folder: Path, *command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command with a stand-in for mpirun, which starts one rank. Yields it, and the rank's first line."""
    (folder / "rank.py").write_text(RANK)
    mpirun = folder / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n'{sys.executable}' '{folder}/rank.py'\nexit 0\n")
    mpirun.chmod(0o755)
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    with started(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        try:
            yield process, process.stdout.readline().strip()
        finally:
            os.killpg(os.getpgid(process.pid), signal.SIGKILL)


HOROVODRUN = ("/bin/sh", "-c", "mpirun --tag-output; exit $?")  # some shells become their last command


@pytest.mark.parametrize("victim", ["horovodrun", "mpirun"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_launcher_is_killed(tmp_path: Path, victim: str, number: signal.Signals) -> None:
    with launched(tmp_path, *HOROVODRUN) as (process, links):
        assert links == "2"
        (mpirun,) = psutil.Process(process.pid).children()
        (process if victim == "horovodrun" else mpirun).send_signal(number)
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "stopped\n"
        assert "hvd_bert: the launcher was killed: stopping this rank" in process.stderr.read()


def test_shell_that_started_mpirun_may_end(tmp_path: Path) -> None:
    """With nohup or &: only the link to mpirun is watched."""
    with launched(tmp_path, "sh", "-c", "mpirun --tag-output; exit $?") as (_, links):
        assert links == "1"


@pytest.mark.parametrize("launcher", ["none", "srun"])
def test_no_launcher_to_watch(launcher: str) -> None:
    before = threading.enumerate()
    signals.watch_launcher(launcher)
    assert threading.enumerate() == before
