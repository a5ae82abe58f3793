"""A process that a test starts ends with it, with all that it has started, also where SIGHUP is ignored."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest
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
