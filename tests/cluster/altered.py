"""Run `python -m hvd_bert.train` with changes that environment variables select: altered.py -m MODULE ...

SLOWED_RANK, SLOWED_S: the rank SLOWED_RANK sleeps for SLOWED_S seconds before each backward pass.
WAITING_STEP: before the backward pass of this step, counted from 1, a job's first attempt waits for SIGUSR1, the
  signal of a time limit, or SIGTERM. Earlier signals are delayed until then, so that tests do not depend on the
  machine's speed.
SIGNALLED_AGAIN: later attempts of the job receive SIGUSR1 as soon as the trainer handles it.
GATED_FOLDER: folder with the pipes `reached` and `go`, in which each rank writes its process id to `RANK.pid`.
GATED_STEP: before this step, counted from 1, rank 0 writes to `reached` and reads from `go`; 0: never.
WATCHED_LOG: file for a line "HOST RANK tokenises" per table of windows that is built, and "failed TIME" at a failure.
WATCHED_FAULT: failure of rank 1. In the second step: kill (SIGKILL), or stall (it reads from a pipe without a writer);
  import: a module is missing.
WATCHED_LISTENERS: folder for a file per rank with the programs that listen on its host in the second step.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hvd_bert.distributed.launch import find_launcher

AWAITED = {signal.SIGUSR1, signal.SIGTERM}
MISSING = "hvd_bert.evaluation.evaluator"


def note(text: str) -> None:
    with open(os.environ["WATCHED_LOG"], "a", encoding="utf-8") as log:
        log.write(text + "\n")


def fail(fault: str) -> None:
    note(f"failed {time.time()}")
    if fault == "stall":
        os.mkfifo(os.environ["WATCHED_LOG"] + ".pipe")
        Path(os.environ["WATCHED_LOG"] + ".pipe").read_bytes()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def note_listeners(folder: Path, rank: int) -> None:
    """Write which programs listen on this host, with their addresses."""
    rows = [row for row in psutil.net_connections("tcp") if row.status == psutil.CONN_LISTEN]
    (folder / str(rank)).write_text(json.dumps([(program(folder, row.pid or 0), row.laddr.ip) for row in rows]))


def program(folder: Path, pid: int) -> str:
    if (folder / f"{pid}.rank").exists():
        return "rank"
    words = psutil.Process(pid).cmdline() if pid else []
    if any("fork_server" in word for word in words):
        return "launcher"
    name = Path(words[0]).name.partition(":")[0] if words else "?"
    # A task of srun is only a client of the fork server. It inherits slurmstepd's sockets.
    return "slurmstepd" if name == "python" else name


class Lacking:
    """An importer that raises ModuleNotFoundError for the module MISSING."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == MISSING:
            note(f"failed {time.time()}")
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def watch(rank: int | None) -> None:
    fault = os.environ.get("WATCHED_FAULT") if rank == 1 else None
    if fault == "import":
        sys.meta_path.insert(0, Lacking())
        for name in ("hvd_bert.training.loop", "hvd_bert.tasks.question_answering", MISSING):
            sys.modules.pop(name, None)  # the fork server has already imported them
        return
    from hvd_bert.data import window_table
    from hvd_bert.strategies.base import Strategy
    from hvd_bert.training.meter import Meter

    listeners = os.environ.get("WATCHED_LISTENERS")
    write, step, steps = window_table._write, Strategy.step, []
    end_step, ended = Meter.end_step, []

    def noted_write(*arguments: Any, **options: Any) -> Any:
        note(f"{socket.gethostname()} {rank} tokenises")
        return write(*arguments, **options)

    def faulty_step(self: Strategy) -> None:
        steps.append(1)
        if fault and len(steps) == 2:
            fail(fault)
        step(self)

    def noted_end(self: Meter, *arguments: Any) -> None:
        ended.append(1)
        if len(ended) == 2:
            note_listeners(Path(str(listeners)), rank)
        end_step(self, *arguments)

    window_table._write, Strategy.step = noted_write, faulty_step  # type: ignore[method-assign]
    if listeners:
        Path(listeners, f"{os.getpid()}.rank").touch()
        Meter.end_step = noted_end  # type: ignore[method-assign]


def before_each_backward(act: Callable[[int], object]) -> None:
    """Call `act` with the number of the backward pass, counted from 1, before each one. A step has one pass."""
    from hvd_bert.strategies.base import Strategy

    backward, steps = Strategy.backward, []

    def altered(self: Strategy, loss: Any) -> None:
        steps.append(1)
        act(len(steps))
        backward(self, loss)

    Strategy.backward = altered  # type: ignore[method-assign]


def wait_for_the_signal(step: int) -> None:
    if step == int(os.environ["WAITING_STEP"]):
        received = signal.sigwait(AWAITED)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        os.kill(os.getpid(), received)  # deliver it to the trainer's handler


def signal_at_the_start() -> None:
    from hvd_bert.distributed.signals import StopRequests

    watched = StopRequests.watched

    @contextmanager
    def signalled(self: StopRequests) -> Iterator[None]:
        with watched(self):
            os.kill(os.getpid(), signal.SIGUSR1)
            yield

    StopRequests.watched = signalled  # type: ignore[method-assign]


def wait_at_the_gate(folder: Path, rank: int) -> None:
    from hvd_bert.data.collate import Prefetcher

    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    micro_batches = Prefetcher.micro_batches

    def gated(self: Prefetcher, number: int) -> Any:
        if rank == 0 and number + 1 == int(os.environ["GATED_STEP"]):
            (folder / "reached").write_text("reached")
            with (folder / "go").open() as go:
                go.read(1)
        return micro_batches(self, number)

    Prefetcher.micro_batches = gated  # type: ignore[method-assign]


assert sys.argv[1] == "-m"
rank = find_launcher(os.environ).rank
if os.environ.get("SLOWED_RANK") == str(rank):
    before_each_backward(lambda step: time.sleep(float(os.environ["SLOWED_S"])))  # simulates a slow device
if "SLURM_RESTART_COUNT" in os.environ:
    if "SIGNALLED_AGAIN" in os.environ:
        signal_at_the_start()
elif "WAITING_STEP" in os.environ:
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)  # inherited by threads that start later
    before_each_backward(wait_for_the_signal)
if "GATED_FOLDER" in os.environ:
    wait_at_the_gate(Path(os.environ["GATED_FOLDER"]), rank or 0)
if "WATCHED_LOG" in os.environ:
    watch(rank)
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
