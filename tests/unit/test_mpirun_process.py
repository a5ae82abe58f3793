"""horovodrun, as env/build_horovod.sh patches it, passes signals on to mpirun and through it to the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("horovod.runner.mpirun_process", reason="env/build_horovod.sh has not built this Horovod")

HOROVODRUN = """
import os, shlex, sys
from horovod.runner import mpirun_process
sys.exit(mpirun_process.run(shlex.join(sys.argv[1:]), dict(os.environ)))
"""
# Stands in for mpirun: prints the signals that it gets, and ends after a number of them.
MPIRUN = """
import signal, sys
signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
for _ in range(int(sys.argv[1])):
    print(signal.Signals(signal.sigwait(signals)).name, flush=True)
sys.exit(75)
"""


@contextmanager
def started(number: int, *by: str) -> Iterator[subprocess.Popen[str]]:
    """A horovodrun whose mpirun ends after `number` signals."""
    mpirun = [sys.executable, "-c", MPIRUN, str(number)]
    command = [*by, sys.executable, "-c", HOROVODRUN, *mpirun]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield process


def output(process: subprocess.Popen[str]) -> list[str]:
    """What mpirun prints until it has ended."""
    assert process.stdout
    return process.stdout.read().split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_ranks_get_a_signal_that_lets_them_save(number: signal.Signals) -> None:
    with started(1) as process:
        process.send_signal(number)
        assert output(process) == ["SIGUSR1"]
    assert process.returncode == (75 if number != signal.SIGHUP else -number)


def test_signal_is_repeated_after_a_kill() -> None:
    """mpirun does not forward the first one if it is still starting the ranks."""
    with started(2) as process:
        process.kill()
        assert output(process) == ["SIGUSR1", "SIGUSR1"]


def test_second_interrupt_ends_the_ranks() -> None:
    with started(2) as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout and process.stdout.readline() == "SIGUSR1\n"
        process.send_signal(signal.SIGINT)
        assert output(process) == ["SIGTERM"]
    assert process.returncode == 75


def test_job_is_suspended_and_resumed() -> None:
    with started(2) as process:
        process.send_signal(signal.SIGTSTP)
        assert process.stdout and process.stdout.readline() == "SIGTSTP\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        process.send_signal(signal.SIGCONT)
        assert output(process) == ["SIGCONT"]


def test_background_job_ignores_interrupts() -> None:
    with started(1, "sh", "-c", 'trap "" INT; exec "$@"', "sh") as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert output(process) == ["SIGUSR1"]
