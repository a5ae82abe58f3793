"""The stand-in for `python` that the other tests start their commands by (tests/fork_server) is like Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import environment, programs, run
from processes import started

pytestmark = pytest.mark.integration

SCRIPT = """
import atexit, os, signal, sys, threading
print("forked" if "hvd_bert.train.loop" in sys.modules else "cold", sys.argv[1:], os.getcwd(), os.environ.get("MINE"))
atexit.register(print, "at exit", flush=True)
threading.Timer(0.1, lambda: print("thread", flush=True)).start()
exec(sys.argv[1])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        ("sys.exit('a reason')", 1, "at exit"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "at exit"),
    ],
)
def test_ends_as_python_does(script: Path, tmp_path: Path, code: str, status: int, last: str) -> None:
    forked, cold = (
        run([sys.executable, script, code], tmp_path, env={"MINE": "set"}, cold=cold) for cold in (False, True)
    )
    for outcome, kind in ((forked, "forked"), (cold, "cold")):
        outcome.expect(status)
        assert outcome.output.startswith(f"{kind} {[code]} {tmp_path} set\n")
        assert (last in outcome.output) and ("thread\n" in outcome.output) == bool(last), outcome
        assert ("\na reason" in outcome.output) == ("a reason" in code), outcome


def test_signal_is_passed_on_and_a_killed_client_ends_its_command(script: Path, tmp_path: Path) -> None:
    code = "print(os.getpid(), flush=True); signal.pause()"
    for number, status in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        words = [programs() / "python", script, code]
        with started(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            client.stdout.readline()
            command = Path(f"/proc/{client.stdout.readline().strip()}")
            assert command.exists() and command.name != str(client.pid)
            os.kill(client.pid, number)
            assert client.wait(30) == status
            deadline = time.monotonic() + 30
            while command.exists():
                assert time.monotonic() < deadline, "the command outlives its client"
                time.sleep(0.02)  # between two looks; the deadline ends them
