"""horovodrun, as patched by env/build_horovod.py, forwards signals to mpirun, which forwards them to the ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
import pytest

from hvd_bert.errors import EXIT_STOPPED

pytestmark = pytest.mark.slow
pytest.importorskip("horovod.runner.mpirun_process", reason="env/build_horovod.sh has not built this Horovod")
if shutil.which("mpirun") is None:
    pytest.skip("mpirun is not on PATH", allow_module_level=True)

HOROVODRUN = """
import os, shlex, sys
from horovod.runner import mpirun_process
sys.exit(mpirun_process.run(shlex.join(sys.argv[1:]), dict(os.environ)))
"""
# A rank that prints each signal and, after a given number of signals, exits with a given status.
RANK = """
import os, signal, sys
signals = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", os.getppid(), flush=True)
for _ in range(int(sys.argv[1])):
    print(signal.Signals(signal.sigwait(signals)).name, flush=True)
sys.exit(int(sys.argv[2]))
"""

# An mpirun whose rank saves after a signal, and which then takes longer to end than the signal's first repetition.
SLOW_MPIRUN = f"""#!{sys.executable}
import signal, subprocess, sys, time
rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
print("ready", flush=True)
signal.sigwait([signal.SIGUSR2])
rank.communicate()
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
time.sleep(3)
sys.exit({EXIT_STOPPED})
"""


class Started(subprocess.Popen[str]):
    between: int  # ID of the process between horovodrun and mpirun

    def line(self) -> str:
        """Read the next line that the rank prints."""
        assert self.stdout
        return self.stdout.readline().rstrip()

    def lines(self) -> list[str]:
        """Read the words that the rank prints until it ends."""
        assert self.stdout
        return self.stdout.read().split()


def parent(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()[1])


@contextmanager
def started(signals: int, status: int = EXIT_STOPPED, **streams: int) -> Iterator[Started]:
    """Context manager: start horovodrun with one rank, which exits with `status` after `signals` signals.

    Yields horovodrun's process once the rank is ready.
    """
    rank = [sys.executable, "-c", RANK, str(signals), str(status)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ["--tag-output", "-mca", "orte_tag_output", "0", "-np", "1"]  # horovodrun's options, with tags disabled
    command = [sys.executable, "-c", HOROVODRUN, "mpirun", *options, *rank]
    with processes.started(
        command, Started, env=os.environ | root, stdout=subprocess.PIPE, text=True, **streams
    ) as process:
        word, mpirun = process.line().split()
        assert word == "ready"
        process.between = parent(int(mpirun))
        yield process


@pytest.mark.parametrize(
    ("number", "to_horovodrun", "status"),
    [
        (signal.SIGTERM, True, EXIT_STOPPED),
        (signal.SIGUSR1, True, EXIT_STOPPED),
        (signal.SIGHUP, True, -signal.SIGHUP),
        (signal.SIGUSR2, False, EXIT_STOPPED),
        (signal.SIGKILL, False, 128 + signal.SIGKILL),
    ],
)
def test_ranks_get_a_signal_that_lets_them_save(number: signal.Signals, to_horovodrun: bool, status: int) -> None:
    with started(1) as process:
        os.kill(process.pid if to_horovodrun else process.between, number)
        assert process.lines() == ["SIGUSR1"]
    assert process.returncode == status


def test_signal_is_repeated_after_a_kill() -> None:
    """The signal must be repeated because mpirun forwards no signal while it starts the ranks."""
    with started(2) as process:
        process.kill()
        assert process.lines() == ["SIGUSR1", "SIGUSR1"]


def test_signal_is_not_repeated_after_the_ranks(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(SLOW_MPIRUN)
    mpirun.chmod(0o755)
    command = [sys.executable, "-c", HOROVODRUN, mpirun, "--tag-output"]
    with processes.started(command, Started, stdout=subprocess.PIPE, text=True) as process:
        assert process.line() == "ready"
        process.send_signal(signal.SIGINT)
    assert process.returncode == EXIT_STOPPED


def test_second_request_ends_the_ranks() -> None:
    number = signal.SIGTERM
    with started(3) as process:
        process.send_signal(number)
        assert process.line() == "SIGUSR1"
        process.send_signal(number)  # too soon to be a second request: `timeout` sends each signal twice
        assert process.line() == "SIGUSR1"  # the first signal, repeated after 2 s
        process.send_signal(number)
        assert process.lines() == ["SIGTERM"]
    assert process.returncode != 0


@pytest.mark.parametrize(("number", "passed", "status"), [("SIGTERM", "SIGUSR1", 0), ("SIGINT", "SIGUSR2", 140)])
def test_signal_before_the_ranks_save_is_the_status(number: str, passed: str, status: int) -> None:
    """mpirun's own status would hide the signal: 0 before it has started the ranks, 140 if SIGUSR2 ended them."""
    with started(1, status=status) as process:
        process.send_signal(signal.Signals[number])
        assert process.lines() == [passed]
    assert process.returncode == 128 + signal.Signals[number]


@pytest.mark.parametrize("status", [EXIT_STOPPED, 1])
def test_output_of_mpirun_is_shown_only_after_a_failure(status: int) -> None:
    with started(1, status, stderr=subprocess.PIPE) as process:
        process.send_signal(signal.SIGINT)
        assert process.lines() == ["SIGUSR2"]
        assert process.stderr and ("exited with non-zero status" in process.stderr.read()) == (status != EXIT_STOPPED)
