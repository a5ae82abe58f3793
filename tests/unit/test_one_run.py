"""A run of a sweep or a tuning: its processes end with the run, and a failed run's reason is found."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import started

from hvd_bert.tools.runs import one_run
from hvd_bert.tools.runs.one_run import Stopped, failure_in, signals, start_and_wait

# A launcher that does not forward signals: a shell, as horovodrun may be. Prints the rank's process ID.
LAUNCHER = "sleep 600 & echo $!; {}wait"


def ends(number: str) -> bool:
    """Wait up to 30 s for a process to end. Returns whether it has ended."""
    try:
        process = os.pidfd_open(int(number))
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([process], [], [], 30)
    os.close(process)
    return bool(ready)


def test_a_run_that_takes_too_long_is_terminated(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        assert start_and_wait(["sh", "-c", LAUNCHER.format("")], os.environ, log, 3, lambda: None) is None
    assert ends((tmp_path / "log").read_text())


def test_a_launcher_that_cannot_be_started_fails_the_run(tmp_path: Path) -> None:
    program = tmp_path / "launcher"
    reason, _ = one_run.train([str(program)], os.environ, tmp_path / "run", 60, lambda: None)
    assert str(program) in reason and "status 127" in reason


@pytest.mark.parametrize("group", ["", "setsid "], ids=["the launcher's group", "a new session"])
def test_ranks_of_a_launcher_that_was_killed_are_terminated(tmp_path: Path, group: str) -> None:
    with (tmp_path / "log").open("w") as log:
        assert (
            start_and_wait(["sh", "-c", f"{group}sleep 600 & echo $!; kill -9 $$"], os.environ, log, 60, lambda: None)
            == -9
        )
    # The process must already be gone, since the next run may start at once.
    assert not psutil.pid_exists(int((tmp_path / "log").read_text()))


def test_earlier_child_processes_are_not_terminated(tmp_path: Path) -> None:
    with started(["sleep", "600"]) as other, (tmp_path / "log").open("w") as log:
        assert start_and_wait(["sh", "-c", "sleep 600 & kill -9 $$"], os.environ, log, 60, lambda: None) == -9
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("name", ["INT", "USR1"])
def test_repeated_signals_terminate_the_run_and_are_raised(tmp_path: Path, name: str) -> None:
    before, waiting = signal.getsignal(signal.SIGINT), tmp_path / "waiting"
    # The child sends the signals, so that they arrive after the fork. An exception during the fork could leave
    # logging's lock held.
    kills = f"until [ -e {waiting} ]; do :; done; for i in 1 2 3 4 5; do kill -{name} {os.getpid()}; done; "
    with (tmp_path / "log").open("w") as log, pytest.raises(Stopped, match=f"SIG{name}"), signals() as check:
        command = ["sh", "-c", LAUNCHER.format(kills)]
        start_and_wait(command, os.environ, log, 60, lambda: waiting.touch() or check())
    assert ends((tmp_path / "log").read_text())
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_during_a_finalizer_terminates_the_run(tmp_path: Path) -> None:
    """Python only prints an exception that is raised in a finalizer, so the signal must also be remembered."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with (tmp_path / "log").open("w") as log, pytest.raises(Stopped, match="SIGINT"), signals() as check:
        start_and_wait(["sleep", "600"], os.environ, log, 20, watch=lambda: check() or (Finalized() and None))
    with (tmp_path / "log").open("w") as log, signals() as check:
        assert start_and_wait(["true"], os.environ, log, 60, check) == 0  # not stopped by the earlier signal


def test_a_run_ends_if_its_sweep_is_killed() -> None:
    program = "import os, sys; from hvd_bert.tools.runs.one_run import start_and_wait as s; "
    program += f"s(['sh', '-c', {LAUNCHER.format('')!r}], os.environ, sys.stdout, 600, lambda: None)"
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        rank = parent.stdout.readline()
        parent.kill()
        assert ends(rank)


def test_the_last_line_is_the_reason_if_no_failure_is_found(tmp_path: Path) -> None:
    for line, reason in (("Segmentation fault", "Segmentation fault"), ("\x1b[2Jlost", r"\x1b[2Jlost")):
        (tmp_path / "log.txt").write_text(f"$ python\n{line}\n\n")
        assert failure_in(tmp_path / "log.txt") == reason
