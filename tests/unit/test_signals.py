"""Signals request a stop after the current step; a second Ctrl-C or SIGTERM ends the run at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import started
from test_world import heard, make_world

from hvd_bert.distributed.signals import SIGNALS, StopRequests


def stops(requests: StopRequests) -> bool:
    requests.start_vote()
    return requests.any_rank_stops()


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_asks_to_stop(number):
    requests = StopRequests(make_world())
    with requests.watched():
        assert not stops(requests)
        os.kill(os.getpid(), number)
        assert stops(requests)
    assert requests.reason() == ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


def test_nohup_keeps_a_run_alive():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # an autouse fixture restores the handler
    requests = StopRequests(make_world())
    with requests.watched():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stops(requests)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("launcher", "received", "ignored"),
    [
        ("mpirun", None, set()),
        ("mpirun", signal.SIGUSR1, {*SIGNALS} - {signal.SIGINT}),  # the launcher may send more signals
        ("srun", None, {signal.SIGUSR1, signal.SIGUSR2}),  # Slurm's time limit warning may come late
    ],
)
def test_signals_ignored_after_a_run(launcher, received, ignored):
    world = make_world()
    world.launcher = launcher
    with StopRequests(world).watched():
        if received:
            os.kill(os.getpid(), received)
    assert {number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN} == ignored


ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
LONG_STEP = """
import torch
from hvd_bert.distributed import logs
from hvd_bert.distributed.signals import StopRequests
from hvd_bert.distributed.world import World

logs.start(0)
with StopRequests(World()).watched():
    print("in a step", flush=True)
    torch.ones(1).expand(10**13).sum()  # hours, in which Python's handlers do not run
"""


@pytest.mark.slow
def test_second_signal_ends_a_long_step_at_once():
    with started([sys.executable, "-c", LONG_STEP], env=ENVIRON, stdout=subprocess.PIPE, text=True) as step:
        assert step.stdout and step.stdout.readline() == "in a step\n"
        for number in (signal.SIGTERM, signal.SIGINT):  # a first Ctrl-C after SIGTERM is not yet the second request
            for repeated in (signal.SIGUSR1, signal.SIGUSR1, number, number):  # `timeout` sends each signal twice
                step.send_signal(repeated)
            assert step.stdout.readline().endswith(f"{number.name}: stopping after this step; again to quit\n")
        while step.poll() is None:  # a signal is a second request only SAME_S after the first
            step.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                step.wait(0.1)
        assert step.returncode == 130


def test_reason_of_a_stop_for_new_hosts_and_for_the_signal_of_another_rank():
    world = make_world()
    requests = StopRequests(world)
    world.process.on_hosts_updated(0.0, 2)
    assert stops(requests) and requests.reason() is None
    requests = StopRequests(heard(make_world(rank=0, size=3), [None, "SIGTERM", None]))
    with requests.watched():
        assert requests.reason() == "SIGTERM to rank 1"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "it may reach this rank later"


# A rank stops when its launcher is killed

RANK = """
import signal
from hvd_bert.distributed import signals
from hvd_bert.distributed.launch import Launcher

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signals.CHECK_S = 0.05
signals.watch_launcher(Launcher("mpirun", 2, 0).row.is_watched)
print("watches", flush=True)
signal.sigwait({signal.SIGUSR1})
print("stopped", flush=True)
"""


def test_launcher_is_killed():
    launcher = ["sh", "-c", f"'{sys.executable}' -c '{RANK}'; exit $?"]  # without `exit`, the shell may exec Python
    with started(launcher, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "watches\n"
        (rank,) = psutil.Process(process.pid).children()
        process.kill()
        assert process.stdout.readline() == "stopped\n"
        assert "hvd_bert: the launcher was killed: stopping this rank" in process.stderr.read()
        rank.wait(60)


# Ctrl-C in any command, even during imports: a single line, status 130, no traceback

# Interrupts the process when it imports the module $INTERRUPTED_AT.
SITECUSTOMIZE = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""


@pytest.fixture(scope="module")
def interrupting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupting")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return folder


def interrupted(words: list[str], module: str, interrupting: Path, stderr: Any = subprocess.PIPE) -> tuple[int, str]:
    """Run a Python module and interrupt it at its import of `module`. Returns its status and standard error."""
    path = os.pathsep.join([str(interrupting), *filter(None, sys.path)])
    env, command = {**os.environ, "PYTHONPATH": path, "INTERRUPTED_AT": module}, [sys.executable, "-m", *words]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    done = subprocess.run(command, cwd=interrupting, env=env, timeout=60, **streams)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["hvd_bert.training.loop", "hvd_bert.training.api"])  # after and before joining
def test_interrupted_command(module, interrupting):
    command = ["hvd_bert.train", "--config", "sample"]
    assert interrupted(command, module, interrupting) == (130, "hvd_bert: interrupted\n")


def test_interrupted_without_a_reader(interrupting):
    """Standard error may have no reader: Ctrl-C also ends a `tee` that reads the command's output."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        assert interrupted(["hvd_bert.tools.timeline", "file"], "numpy", interrupting, stderr)[0] == 130


def test_ignored_interrupt_stays_ignored(interrupting):
    """A command must not react to SIGINT if its parent ignored it, as shells do for background jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the command; an autouse fixture restores the handler
    assert interrupted(["hvd_bert.tools.timeline", "--help"], "numpy", interrupting) == (0, "")
