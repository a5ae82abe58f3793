"""A process that a test starts ends with it, with all that it has started, also where SIGHUP is ignored."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from launch import REPOSITORY
from processes import started

STUBBORN = "trap '' HUP TERM; setsid sleep 600 & echo $!; wait"


def test_whatever_a_test_raises():
    with (
        pytest.raises(ZeroDivisionError),
        started(["sh", "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout
        other = os.pidfd_open(int(process.stdout.readline()))
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert select.select([other], [], [], 30)[0], "the process in another session still runs"
    os.close(other)


def test_after_its_limit():
    with pytest.raises(subprocess.TimeoutExpired), started(["sleep", "600"], limit_s=0.1) as process:
        pass
    assert process.returncode == -signal.SIGKILL


def test_hang_up_ends_a_process():
    with started(["sleep", "600"]) as process:
        process.send_signal(signal.SIGHUP)
    assert process.returncode == -signal.SIGHUP


@pytest.mark.slow
def test_tests_run_under_nohup():
    words = ["nohup", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::"]
    words[-1] += test_hang_up_ends_a_process.__name__
    with started(words, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tests:
        assert tests.stdout
        output = tests.stdout.read()
    assert tests.returncode == 0, output
