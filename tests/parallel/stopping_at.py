"""Train, and send a signal at an exact moment: `python stopping_at.py STEP RANK SIGNAL MOMENT ARGUMENTS...`.

STEP: counted from 1; 0: no signal. RANK: a rank, or several ranks such as 2,3.
SIGNAL: a name such as SIGTERM, "hosts" to wait until Horovod elastic reports other hosts, or "move" to rename the
folder `out` to `moved`.
MOMENT: "start" of the step; "inside" the step, after the first micro-batch; a number of seconds between SIGSTOP and
SIGCONT; a name in PHASES for SIGKILL at a random moment of that phase; "queued" for the time at which another rank
waits for an operation that Horovod never finishes.
In the working directory, each rank records its windows in windows-RANK.jsonl, the time of a signal in `signalled`, and
the time of its first step in another world in `resumed`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvd_bert.checkpoint import files
from hvd_bert.data.collate import Batch, Prefetcher
from hvd_bert.distributed.world import ProcessState
from hvd_bert.output import run_folder
from hvd_bert.strategies.base import Strategy
from hvd_bert.strategies.horovod import HorovodStrategy
from hvd_bert.tasks.question_answering import QuestionAnswering
from hvd_bert.training.loop import Evaluations
from hvd_bert.training.saving import Checkpoints

# Phase -> the trainer's functions that run in it. A checkpoint is written while the next steps run.
PHASES = {
    "saving": (Checkpoints.save, files.write, run_folder.save_model),
    "evaluation": (Evaluations.evaluate,),
    "forward": (QuestionAnswering.losses,),
    "backward": (Strategy.backward,),
    "allreduce": (HorovodStrategy.synchronize,),
    "update": (Strategy.clip, Strategy.step),
}


@contextmanager
def signal_at(
    step: int, ranks: set[int], name: str, moment: str = "start", records: Path | None = None
) -> Iterator[None]:
    """Context manager: in `step`, the process of each rank in `ranks` sends the signal `name` to itself.

    `moment` and further values of `name`: see this module's docstring. `records`: folder for the recorded windows.
    """
    original = Prefetcher.micro_batches
    worlds: list[Prefetcher] = []  # one prefetcher per world of Horovod elastic

    def micro_batches(self: Prefetcher, number_of_step: int) -> Iterator[Batch]:
        own_rank = self.rank
        if self not in worlds:
            worlds.append(self)
            if records and len(worlds) > 1:
                (records / "resumed").write_text(str(time.time()), encoding="utf-8")
        windows = self.plan.rank_windows(number_of_step, own_rank)
        record = records / f"windows-{own_rank}.jsonl" if records else None
        for index, (ids, batch) in enumerate(zip(windows, original(self, number_of_step), strict=True)):
            here = (number_of_step + 1, index) == (step, 1 if moment == "inside" else 0)
            if here and own_rank in ranks and len(worlds) == 1:
                if records:
                    (records / "signalled").write_text(str(time.time()), encoding="utf-8")
                if name == "hosts":
                    assert notified.wait(90), "Horovod elastic has notified of no other hosts"
                elif name == "move":
                    os.rename("out", "moved")
                elif moment in PHASES:
                    threading.Thread(target=die_during, args=(moment,), daemon=True).start()
                elif moment.isdigit():
                    stop = f"kill -STOP {os.getpid()}; sleep {moment}; kill -CONT {os.getpid()}"
                    subprocess.Popen(["sh", "-c", stop], start_new_session=True, stdout=-3, stderr=-3)  # -3: DEVNULL
                else:
                    while moment == "queued" and records and not [*records.parent.glob("*/waiting")]:
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.Signals[name])
            if record:
                with record.open("a", encoding="utf-8") as file:
                    row = {"world": len(worlds), "step": number_of_step + 1, "windows": ids.tolist()}
                    file.write(json.dumps(row) + "\n")
            yield batch

    Prefetcher.micro_batches = micro_batches  # type: ignore[method-assign]
    try:
        with noted_hosts() as notified:
            yield
    finally:
        Prefetcher.micro_batches = original  # type: ignore[method-assign]


def notes(folder: Path) -> list[dict[str, Any]]:
    """Read the ranks' records of their micro-batches. `world`: 1 for the first world, 2 for the next world."""
    return [json.loads(line) for path in folder.rglob("windows-*.jsonl") for line in path.read_text().splitlines()]


def taken(folder: Path, last: int) -> dict[int, Counter[int]]:
    """Count the windows per step: those of the first world up to step `last`, and of later worlds after it."""
    found: dict[int, Counter[int]] = {}
    for row in notes(folder):
        if (row["world"] > 1) == (row["step"] > last):
            found.setdefault(row["step"], Counter()).update(row["windows"])
    return found


def current_phase() -> str | None:
    """Return this process's current phase, or None."""
    stacks = sys._current_frames().values()
    codes = {frame.f_code for stack in stacks for frame, _ in traceback.walk_stack(stack)}
    return next((phase for phase, within in PHASES.items() if codes & {f.__code__ for f in within}), None)


def die_during(phase: str, mean_s: float = 0.01) -> None:
    """Kill this process by SIGKILL at a random moment of the phase: the first event of a Poisson process."""
    dice = random.Random(os.getpid())  # must not change the training's random numbers
    while current_phase() != phase:
        time.sleep(dice.expovariate(1 / mean_s))
    os.kill(os.getpid(), signal.SIGKILL)  # this thread holds the interpreter's lock, so the phase cannot end in between


def queue_too_late(folder: Path) -> None:
    """Make this process wait forever for an operation once another rank has been signalled, and create `waiting`."""
    from horovod.torch.mpi_ops import mpi_lib

    poll = mpi_lib.horovod_torch_poll

    def poll_until_signalled(handle: int) -> bool:
        if not [*folder.glob("*/signalled")]:
            return bool(poll(handle))
        Path("waiting").touch()
        return False

    mpi_lib.horovod_torch_poll = poll_until_signalled


@contextmanager
def noted_hosts() -> Iterator[threading.Event]:
    """Context manager: yield an event that is set when Horovod elastic notifies this process of other hosts."""
    notified, original = threading.Event(), ProcessState.on_hosts_updated

    def on_hosts_updated(self: ProcessState, *given: Any) -> None:
        original(self, *given)
        notified.set()

    ProcessState.on_hosts_updated = on_hosts_updated  # type: ignore[method-assign]
    try:
        yield notified
    finally:
        ProcessState.on_hosts_updated = original  # type: ignore[method-assign]


if __name__ == "__main__":
    from hvd_bert.config import command_line
    from hvd_bert.distributed.runner import run_as_rank
    from hvd_bert.training.api import main

    step, ranks, name, moment = sys.argv[1:5]
    del sys.argv[1:5]
    if moment == "queued":
        queue_too_late(Path.cwd().parent)
    with signal_at(int(step), {int(rank) for rank in ranks.split(",")}, name, moment, records=Path.cwd()):
        run_as_rank(main, **command_line.before_joining(sys.argv[1:]))
