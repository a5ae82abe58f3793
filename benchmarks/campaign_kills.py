"""Kill or stop trainings in forked ranks, and compare them with uninterrupted trainings.

The ranks are forked from a process that has imported everything, so that hundreds of starts take only minutes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from shared import small_run, tiny_bert

import hvd_bert.training.loop  # noqa: F401  # imported before the fork, so that ranks need not import it
from hvd_bert.checkpoint import files
from hvd_bert.distributed.rendezvous import serve_store
from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.distributed.world import World
from hvd_bert.errors import EXIT_STOPPED
from hvd_bert.output.callback import Callback
from hvd_bert.storage.writing import flush
from hvd_bert.tasks.base import Task
from hvd_bert.training import api
from hvd_bert.training.state import TrainState

RANKS = 2
END_S = 60.0  # maximum time until a rank ends after another rank was killed
LIMIT_S = 600.0  # a run without a finished step for this long has hung
SAVE_STEPS = 8  # steps between two checkpoints of `kills`
PAUSE_S = 0.4  # pause after each step of `rank_kills`
SLOWER_S = 0.03  # maximum delay per checkpoint file; the average is a third of it
TIMES = ("_s", "_share", "mfu")  # endings of the keys in metrics.jsonl whose values depend on time
NEVER = (0, math.inf)
FORK = multiprocessing.get_context("fork")


class Reporter(Callback):
    """Reports the steps of a forked rank to the parent process."""

    pipe: Any

    def on_step(self, step: int) -> None:
        self.pipe.send(("done", step))


class Paced(Reporter):
    """Pauses for PAUSE_S after each step."""

    def on_step(self, step: int) -> None:
        super().on_step(step)
        time.sleep(PAUSE_S)


class Stopped(Reporter):
    """Sends SIGTERM to its own process before every tenth step except the last."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step(self, step: int) -> None:
        super().on_step(step)
        if (step + 1) % 10 == 0 and step + 1 < self.last:
            os.kill(os.getpid(), signal.SIGTERM)


class SlowWrites(Reporter):
    """Delays the write of each file of a checkpoint, and reports the step at which the write of a checkpoint begins."""

    def __init__(self, slower_s: float) -> None:
        self.slower_s = slower_s

    def on_start(self, task: Task, world: World) -> None:
        snapshot = TrainState.snapshot

        def slow_flush(path: Path) -> None:
            time.sleep(self.slower_s)
            flush(path)

        def reported_snapshot(state: TrainState) -> Any:
            self.pipe.send(("writes", state.step))
            return snapshot(state)

        patch.object(files, "flush", slow_flush).start()  # the patches last until this rank ends
        patch.object(TrainState, "snapshot", reported_snapshot).start()


@dataclass
class Attempt:
    """The outcome of a training.

    `done`: steps that rank 0 finished. `writes`: steps at which rank 0 began to write a checkpoint. `statuses`: each
    rank's exit status.
    """

    done: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)

    @property
    def killed(self) -> bool:
        return -signal.SIGKILL in self.statuses


def attempt(
    flags: Sequence[str], size: int = 1, reporter: Reporter | None = None, kill: tuple[int, float] = NEVER
) -> Attempt:
    """Train on `size` ranks until all have ended.

    `kill`: steps and seconds; a random rank is killed these seconds after rank 0 has finished this number of steps.
    Raises SystemExit if a run fails without a kill, finishes no step for LIMIT_S s, or outlives a kill by END_S s.
    """
    store = serve_store("127.0.0.1") if size > 1 else None
    ranks: dict[Any, Any] = {}  # pipe -> process
    reporter = reporter or Reporter()
    for rank in range(size):
        reading, reporter.pipe = FORK.Pipe(duplex=False)
        ranks[reading] = FORK.Process(target=train, args=(rank, size, store, flags, reporter))
        ranks[reading].start()
        reporter.pipe.close()
    first, (begun, delay_s), made = next(iter(ranks)), kill, Attempt()
    heard, killed = time.monotonic(), False
    kill_at = math.inf if begun else heard + delay_s
    while ranks:
        now = time.monotonic()
        if now > heard + (END_S if killed else LIMIT_S):
            for process in ranks.values():
                process.kill()
            raise SystemExit("The run hangs: no step, or a rank outlived a killed one.")
        if now >= kill_at:
            random.choice(list(ranks.values())).kill()
            killed, kill_at, heard = True, math.inf, now
        ready: list[Any] = connection.wait(list(ranks), min(1.0, kill_at - now))
        for pipe in ready:
            heard = heard if killed else time.monotonic()
            try:
                what, step = pipe.recv()
            except EOFError:
                process = ranks.pop(pipe)
                process.join()
                made.statuses.append(process.exitcode)
                continue
            if pipe is first:
                getattr(made, what).append(step)
                if what == "done" and len(made.done) == begun:
                    kill_at = time.monotonic() + delay_s
    if not made.killed and set(made.statuses) - {0, EXIT_STOPPED}:
        raise SystemExit(f"The training failed: statuses {made.statuses}.")
    return made


def train(rank: int, size: int, store: Any, flags: Sequence[str], reporter: Reporter) -> None:
    """Train as rank `rank` of `size` over Gloo. Runs in a forked process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if store:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        job |= {"TORCHELASTIC_RUN_ID": "forked", "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
        job |= {"RANK": rank, "LOCAL_RANK": rank}
        os.environ.update({name: str(value) for name, value in job.items()})

    def run(world: World) -> None:
        api.run([*flags], world, [reporter])

    run_as_rank(run)


def differences(one: Path, other: Path) -> list[str]:
    """Return the differences between two finished runs. Everything except times must be equal bit for bit."""
    mine, theirs = read_result(one), read_result(other)
    return [f"{name} differs" for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]


def read_result(out: Path) -> dict[str, Any]:
    """Return checksums of the last checkpoint's tensors, its state and the lines of metrics.jsonl, without times."""
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
    """Compare a two-rank run that SIGTERM stops every 10 steps with an uninterrupted run."""
    last = 10 * (number + 1)
    flags = small_run(f"--max_steps {last} --save_steps {last} --eval_strategy no") + tiny_bert(folder)
    attempt([*flags, "--output_dir", str(folder / "whole")], RANKS)
    flags += ["--output_dir", str(folder / "out")]
    resumes = 0
    while EXIT_STOPPED in attempt(flags, RANKS, Stopped(last)).statuses:
        resumes += 1
    return {"resumes": resumes, "failures": differences(folder / "whole", folder / "out")}


def rank_kills(folder: Path, minutes: int) -> dict[str, Any]:
    """Compare a two-rank run in which a rank is killed every minute with an uninterrupted run."""
    os.environ["HOROVOD_CYCLE_TIME"] = "5"  # polling once per millisecond would occupy a core
    steps = int(60 * minutes / PAUSE_S)  # more steps than fit in `minutes`
    flags = small_run(f"--max_steps {steps} --save_steps 20 --eval_strategy steps --eval_steps 50") + tiny_bert(folder)
    attempt([*flags, "--output_dir", str(folder / "whole")], RANKS)
    flags += ["--output_dir", str(folder / "out")]
    killed, begin = 0, time.monotonic()
    while attempt(flags, RANKS, Paced(), (0, 60.0) if time.monotonic() < begin + 60 * minutes else NEVER).killed:
        killed += 1
        print(f"{time.monotonic() - begin:.0f} s: {killed} kills", file=sys.stderr, flush=True)
    return {"kills": killed, "steps": steps, "failures": differences(folder / "whole", folder / "out")}


def kills(folder: Path, number: int) -> dict[str, Any]:
    """Compare a run that is killed at random moments with an uninterrupted run.

    Some kills occur at startup, most during training, and many of them during a checkpoint write. Random delays slow
    the writes: some end within a few steps, others are still in progress when the next checkpoint is due.
    """
    tally: dict[str, Any] = {"failures": [], "kills": 0, "while_starting": 0, "while_writing": 0, "steps_lost": []}
    last = 3 * SAVE_STEPS * number
    flags = small_run(f"--save_steps {SAVE_STEPS} --logging_steps 1 --eval_strategy no --max_steps {last} --output_dir")
    attempt([*flags, str(folder / "whole")])
    dice, saved, out = random.Random(0), 0, folder / "out"
    while tally["kills"] < number:
        begun = 0 if dice.random() < 0.1 else dice.randint(1, 3 * SAVE_STEPS)
        delay_s = dice.random() * (0.2 if begun else 0.5)  # the first step begins after about half a second
        made = attempt([*flags, str(out)], 1, SlowWrites(SLOWER_S * dice.random() ** 2), (begun, delay_s))
        if not made.killed:
            break
        saved = inspect(out, made, saved, tally)
    attempt([*flags, str(out)])
    tally["failures"] += differences(folder / "whole", out)
    lost = tally.pop("steps_lost")
    return tally | {"median_steps_lost": statistics.median(lost), "most_steps_lost": max(lost)}


def inspect(out: Path, made: Attempt, before: int, tally: dict[str, Any]) -> int:
    """Check the checkpoints in `out` after a kill and update `tally`. Returns the step of the newest intact checkpoint.

    `before`: the step that was returned after the previous kill.
    """
    tally["kills"] += 1
    tally["while_starting"] += not made.done
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
    if made.done:
        done = made.done[-1]
        in_write = done - made.writes[-1] if made.writes and made.writes[-1] > saved else 0
        tally["steps_lost"].append(done - saved)
        if done - saved > SAVE_STEPS + in_write or in_write > SAVE_STEPS:
            tally["failures"].append(f"lost {done - saved} of {done} steps, {in_write} of them during a write")
    return saved
