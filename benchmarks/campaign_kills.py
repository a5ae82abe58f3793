"""Trainings in forked ranks that are killed or stopped, and what that leaves.

The ranks start with everything imported, so that hundreds of starts take minutes.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shared import small_run, tiny_bert

import hvd_bert.training.loop  # noqa: F401  # imported before the fork, else each rank would import it
from hvd_bert.checkpoint import files
from hvd_bert.distributed.rendezvous import serve_store
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_STOPPED
from hvd_bert.output.callback import Callback
from hvd_bert.storage.writing import flush
from hvd_bert.training import api
from hvd_bert.training.state import TrainState

RANKS = 2
END_S = 60.0  # for a rank to end by itself after another one was killed
LIMIT_S = 600.0  # without a step: the run hangs
SAVE_STEPS = 8  # between the checkpoints of `kills`
SLOWER_S = 0.03  # at most, per file of a checkpoint; a third on average
TIMES = ("_s", "_share", "mfu")  # ends of the keys of metrics.jsonl that depend on time
REPORT_BYTES = 16
NEVER = (0, math.inf)
stores: list[Any] = []  # until this process ends
Prepare = Callable[["Reporter"], None]
Then = Callable[[int], None]


class Reporter(Callback):
    """Reports what a forked rank does to the process that started it: each step that it has done.

    `prepare`: called in the rank before it trains; what it patches ends with the rank. `then`: called after each step.
    """

    pipe = -1

    def __init__(self, prepare: Prepare = lambda reporter: None, then: Then = lambda step: None) -> None:
        self.prepare, self.then = prepare, then

    def report(self, what: str, step: int) -> None:
        """Send a message."""
        os.write(self.pipe, f"{what:7}{step:8}\n".encode())

    def on_step(self, step: int) -> None:
        self.report("done", step)
        self.then(step)


def stopped(last: int) -> Reporter:
    """Stops its run by SIGTERM after every tenth step before the last one."""

    def stop(step: int) -> None:
        if (step + 1) % 10 == 0 and step + 1 < last:
            os.kill(os.getpid(), signal.SIGTERM)

    return Reporter(then=stop)


def slow_writes(slower_s: float) -> Reporter:
    """Each file of a checkpoint takes longer to write. Reports the begin and the end of a write."""

    def prepare(reporter: Reporter) -> None:
        write, snapshot = files.write, TrainState.snapshot

        def slow_flush(path: Path) -> None:
            time.sleep(slower_s)
            flush(path)

        def reported_snapshot(state: TrainState) -> Any:
            reporter.report("writes", state.step)
            return snapshot(state)

        def reported_write(folder: Path, step: int, contents: files.Contents) -> Path:
            written = write(folder, step, contents)
            reporter.report("written", step)
            return written

        patch.object(files, "flush", slow_flush).start()
        patch.object(files, "write", reported_write).start()
        patch.object(TrainState, "snapshot", reported_snapshot).start()

    return Reporter(prepare)


@dataclass
class Attempt:
    """How a training ended. `reports`: rank 0's; `statuses`: the ranks'."""

    reports: list[tuple[str, int]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.statuses

    @property
    def steps(self) -> list[int]:
        """The steps that are done."""
        return [step for what, step in self.reports if what == "done"]

    @property
    def writing(self) -> int:
        """The step of the checkpoint that was being written at the end; 0: none."""
        what, step = next((report for report in reversed(self.reports) if report[0] != "done"), ("", 0))
        return step if what == "writes" else 0


def attempt(
    flags: Sequence[str], size: int = 1, reporter: Reporter | None = None, kill: tuple[int, float] = NEVER
) -> Attempt:
    """Train on `size` ranks until they end. `kill`: steps and then seconds after which a random rank is killed.

    Fails if a run fails that was not killed, or if the other ranks do not end by themselves.
    """
    ranks = dict(start(rank, size, flags, reporter or Reporter()) for rank in range(size))
    first, (begun, delay_s), made = next(iter(ranks)), kill, Attempt()
    heard, killed = time.monotonic(), False
    kill_at = math.inf if begun else heard + delay_s
    while ranks:
        now = time.monotonic()
        if now > heard + (END_S if killed else LIMIT_S):
            for child in ranks.values():
                os.kill(child, signal.SIGKILL)
            raise SystemExit("The run hangs: no step, or a rank outlived a killed one.")
        if now >= kill_at:
            os.kill(random.choice(list(ranks.values())), signal.SIGKILL)
            killed, kill_at, heard = True, math.inf, now
        for pipe in select.select(list(ranks), [], [], min(1.0, kill_at - now))[0]:
            heard = heard if killed else time.monotonic()
            message = os.read(pipe, REPORT_BYTES).decode()
            if not message:
                os.close(pipe)
                made.statuses.append(os.waitstatus_to_exitcode(os.waitpid(ranks.pop(pipe), 0)[1]))
            elif pipe == first:
                what, step = message.split()
                made.reports.append((what, int(step)))
                if what == "done" and len(made.steps) == begun:
                    kill_at = time.monotonic() + delay_s
    if not made.killed and set(made.statuses) - {0, EXIT_STOPPED}:
        raise SystemExit(f"The training failed: statuses {made.statuses}.")
    return made


def start(rank: int, size: int, flags: Sequence[str], reporter: Reporter) -> tuple[int, int]:
    """Train in a forked rank, over Gloo. Returns the reading end of its pipe and its process id."""
    if rank == 0 and size > 1:
        stores.append(serve_store("127.0.0.1"))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": stores[-1].port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        job |= {"TORCHELASTIC_RUN_ID": "forked", "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
        os.environ.update({name: str(value) for name, value in job.items()})
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return reading, child
    os.close(reading)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    reporter.pipe = writing

    def train(world: World) -> None:
        api.run([*flags], world, [reporter])

    status = 1
    try:
        reporter.prepare(reporter)
        run_as_rank(train)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)  # the rest of the program is the parent's


def differences(one: Path, other: Path) -> list[str]:
    """Where two finished runs differ, bit for bit."""
    mine, theirs = read_result(one), read_result(other)
    return [f"{name} differs" for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]


def read_result(out: Path) -> dict[str, Any]:
    """Checksums of the last checkpoint's tensors, its state, and the lines of metrics.jsonl; all without times."""
    newest = files.candidates(out)[0]
    result: dict[str, Any] = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["files"]
    result = {name: checksum for name, checksum in result.items() if name.endswith(".safetensors")}
    result |= files.read(newest).state
    result["meter"] = {name: value for name, value in result["meter"].items() if name not in ("train_s", "seconds")}
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        row = {name: row[name] for name in row if not name.endswith(TIMES) or name == "padding_share"}
        result[f"metrics.jsonl: step {row['step']}: {', '.join(row)}"] = row
    return result


def stops(folder: Path, number: int) -> dict[str, Any]:
    """A run of two ranks that SIGTERM stops every 10 steps, and one that nothing stops."""
    last = 10 * (number + 1)
    flags = small_run(f"--max_steps {last} --save_steps {last} --eval_strategy no") + tiny_bert(folder)
    attempt([*flags, "--output_dir", str(folder / "whole")], RANKS)
    flags += ["--output_dir", str(folder / "out")]
    resumes = 0
    while EXIT_STOPPED in attempt(flags, RANKS, stopped(last)).statuses:
        resumes += 1
    return {"resumes": resumes, "failures": differences(folder / "whole", folder / "out")}


def rank_kills(folder: Path, minutes: int) -> dict[str, Any]:
    """A run in which one of two ranks is killed every minute, and one in which none is."""
    os.environ["HOROVOD_CYCLE_TIME"] = "5"  # an hour of polling once a millisecond would take a core
    pause_s = 0.4
    steps = int(60 * minutes / pause_s)  # they take longer than `minutes`
    flags = small_run(f"--max_steps {steps} --save_steps 20 --eval_strategy steps --eval_steps 50") + tiny_bert(folder)
    attempt([*flags, "--output_dir", str(folder / "whole")], RANKS)
    flags += ["--output_dir", str(folder / "out")]
    paced, killed, begin = Reporter(then=lambda step: time.sleep(pause_s)), 0, time.monotonic()
    while attempt(flags, RANKS, paced, (0, 60.0) if time.monotonic() < begin + 60 * minutes else NEVER).killed:
        killed += 1
        print(f"{time.monotonic() - begin:.0f} s: {killed} kills", file=sys.stderr, flush=True)
    return {"kills": killed, "steps": steps, "failures": differences(folder / "whole", folder / "out")}


def kills(folder: Path, number: int) -> dict[str, Any]:
    """A run that is killed at random moments, and one that never is.

    Some kills hit the start, most the training, and many the write of a checkpoint, which is slowed down for that: in
    some attempts it takes fewer steps than --save_steps, in others more.
    """
    tally: dict[str, Any] = {"failures": [], "kills": 0, "while_starting": 0, "while_writing": 0, "steps_lost": []}
    last = 3 * SAVE_STEPS * number
    flags = small_run(f"--save_steps {SAVE_STEPS} --logging_steps 1 --eval_strategy no --max_steps {last} --output_dir")
    attempt([*flags, str(folder / "whole")])
    dice, saved, out = random.Random(0), 0, folder / "out"
    while tally["kills"] < number:
        begun = 0 if dice.random() < 0.1 else dice.randint(1, 3 * SAVE_STEPS)
        delay_s = dice.random() * (0.2 if begun else 0.5)  # half a second: about the time until the first step
        made = attempt([*flags, str(out)], 1, slow_writes(SLOWER_S * dice.random() ** 2), (begun, delay_s))
        if not made.killed:
            break
        saved = inspect(out, made, saved, tally)
    attempt([*flags, str(out)])
    tally["failures"] += differences(folder / "whole", out)
    lost = tally.pop("steps_lost")
    return tally | {"median_steps_lost": statistics.median(lost), "most_steps_lost": max(lost)}


def inspect(out: Path, made: Attempt, before: int, tally: dict[str, Any]) -> int:
    """Count what a kill left in `out`. Returns the step of the newest checkpoint. `before`: that before the kill."""
    tally["kills"] += 1
    tally["while_starting"] += not made.steps
    tally["while_writing"] += any(out.glob(".partial-checkpoint-*"))
    saved = 0
    for folder in files.candidates(out):
        try:
            files.read(folder)
            saved = max(saved, files.checkpoint_step(folder))
        except files.CorruptCheckpoint as error:
            tally["failures"].append(f"damaged: {error}")
    if saved < before:
        tally["failures"].append(f"went back from step {before} to {saved}")
    if made.steps:
        done = made.steps[-1]
        in_write = done - made.writing if made.writing > saved else 0
        tally["steps_lost"].append(done - saved)
        if done - saved > SAVE_STEPS + in_write or in_write > SAVE_STEPS:
            tally["failures"].append(f"lost {done - saved} of {done} steps, {in_write} of them during a write")
    return saved
