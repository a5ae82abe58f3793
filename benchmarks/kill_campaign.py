"""Kills a training at random moments and checks what each kill leaves.

    python benchmarks/kill_campaign.py --kills 200 --out DIR

Each attempt resumes the run that the last kill interrupted. Some kills hit the start, most the training, and many the
write of a checkpoint, which is slowed down for that: in some attempts it takes fewer steps than --save_steps, in others
more. The last attempt is not killed. The run must then equal one that was never killed, bit for bit. Prints the figures
of docs/evidence/benchmarks.md as JSON. Exit status 1 if a checkpoint was damaged, a kill lost more than --save_steps
steps and those taken during the write that it hit, these were more than --save_steps, or the two runs differ.

Before that it kills a resumed run at each point at which that writes the checkpoint of its stop again. Exit status 1 if
the next start does not resume from that step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import forked_training
from shared import killed_before_change

from hvd_bert.checkpoint import files
from hvd_bert.errors import EXIT_STOPPED
from hvd_bert.storage.writing import flush
from hvd_bert.training.state import TrainState

SAVE_STEPS = 8
SLOWER_S = 0.1  # at most, per file of a checkpoint; a third on average
TIMES = ("_s", "_share", "mfu")  # ends of the keys of metrics.jsonl that depend on time


@dataclass
class Tally:
    """What the kills met, and what they left."""

    kills: int = 0
    while_starting: int = 0
    while_writing: int = 0
    without_checkpoint_yet: int = 0
    damaged: list[str] = field(default_factory=list)
    went_back: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    steps_of_writes: list[int] = field(default_factory=list)  # steps since the beginning of the writes that kills hit
    lost_too_many: list[str] = field(default_factory=list)


def slowed(function: Callable[[Path], None], seconds: float) -> Callable[[Path], None]:
    """The function, after a pause."""

    def slow(path: Path) -> None:
        time.sleep(seconds)
        function(path)

    return slow


@contextmanager
def noting_writes() -> Iterator[Callable[[], int | None]]:
    """Inside, a training notes its writes. Yields a function: the step of a write that has begun and not ended."""
    write, snapshot = files.write, TrainState.snapshot
    with tempfile.TemporaryFile() as notes:

        def noting_snapshot(state: TrainState) -> Any:
            os.write(notes.fileno(), f"{state.step} begun\n".encode())
            return snapshot(state)

        def noting_write(folder: Path, step: int, contents: files.Contents) -> Path:
            written = write(folder, step, contents)
            os.write(notes.fileno(), f"{step} ended\n".encode())
            return written

        def unfinished() -> int | None:
            notes.seek(0)
            lines = [line.split() for line in notes.read().decode().splitlines()]
            return int(lines[-1][0]) if lines and lines[-1][1] == "begun" else None

        with patch.object(files, "write", noting_write), patch.object(TrainState, "snapshot", noting_snapshot):
            yield unfinished


def let_through(flags: list[str], stop_at: int = 0) -> tuple[int, int]:
    """Train until the run ends. Returns its status and its number of steps. `stop_at`: the step that gets a SIGTERM."""

    def stop(step: int) -> None:
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    child, pipe = forked_training.start(flags, stop)
    steps = 0
    while forked_training.read_step(pipe):
        steps += 1
    os.close(pipe)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), steps


def kill_rewrites(flags: list[str], folder: Path) -> tuple[int, list[int]]:
    """Stop a run at an evaluation, in the middle. Resume it often: it evaluates, and saves that step again.

    The n-th time it is killed before the write's n-th change in its folder, and started once more. Returns the number
    of kills, and those after which the run did not resume.
    """
    flags = [*flags, "--max_steps", str(2 * SAVE_STEPS), "--eval_strategy", "steps", "--eval_steps", str(SAVE_STEPS)]
    stopped, write = folder / "stopped", files.write
    lost: list[int] = []
    if let_through([*flags, "--output_dir", str(stopped)], SAVE_STEPS)[0] != EXIT_STOPPED:
        raise SystemExit("The training did not stop.")
    for number in itertools.count(1):
        out = shutil.copytree(stopped, folder / str(number))
        again = [*flags, "--load_best_model_at_end", "--output_dir", str(out)]

        def killed(out: Path, step: int, contents: files.Contents, number: int = number) -> Path:
            with killed_before_change(number if step == SAVE_STEPS else 0):
                return write(out, step, contents)

        with patch.object(files, "write", killed):
            status = let_through(again)[0]
        if status == 0:
            return number - 1, lost
        if status != -signal.SIGKILL or let_through(again) != (0, SAVE_STEPS):
            lost.append(number)
        shutil.rmtree(out)
    raise AssertionError("count() does not end")


def train_and_kill(flags: list[str], begun: int, delay_s: float, slower_s: float) -> tuple[int, bool]:
    """Train, and send SIGKILL `delay_s` seconds after the attempt has begun `begun` steps (0: after its start).

    `slower_s`: by how much each file of a checkpoint takes longer to write.

    Returns the number of the last step that began (0: none), and whether the run ended before the kill.
    """
    with patch.object(files, "flush", slowed(flush, slower_s)):
        child, pipe = forked_training.start(flags)
    last = 0
    for _ in range(begun):
        last = forked_training.read_step(pipe) or last
    deadline = time.monotonic() + delay_s
    ended = False
    while not ended and select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
        step = forked_training.read_step(pipe)
        last, ended = step or last, step is None
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.close(pipe)
    status = os.waitpid(child, 0)[1]
    if ended and status:
        raise SystemExit(f"The training failed with status {os.waitstatus_to_exitcode(status)}.")
    return last, ended


def inspect(out: Path, last: int, before: int, writing: int | None, tally: Tally) -> int:
    """Count what a kill left in `out`; returns the step of the newest checkpoint.

    `last`: the last step that began; `before`: the newest checkpoint's step before the attempt; `writing`: the step of
    the checkpoint that was being written.
    """
    tally.while_writing += any(out.glob(".partial-checkpoint-*"))
    saved = 0
    found = files.candidates(out)
    for folder in found:
        try:
            files.read(folder)
            saved = max(saved, files.step_of(folder))
        except files.CorruptCheckpoint as error:
            tally.damaged.append(str(error))
    tally.without_checkpoint_yet += not found
    if saved < before:
        tally.went_back.append(f"from step {before} to {saved}")
    if last:
        finished = last - 1  # the last step had only begun
        tally.steps_lost.append(finished - saved)
        of_write = finished - writing if writing is not None and saved < writing else 0
        if of_write:
            tally.steps_of_writes.append(of_write)
        if finished - saved > SAVE_STEPS + of_write or of_write > SAVE_STEPS:
            tally.lost_too_many.append(f"{finished - saved} of {finished}, {of_write} of them during a write")
    else:
        tally.while_starting += 1
    return saved


def differences(one: Path, other: Path) -> list[str]:
    """Where two finished runs differ, bit for bit; times are exempt."""
    found = []
    mine, theirs = (result_of(out) for out in (one, other))
    for name in mine.keys() | theirs.keys():
        if mine.get(name) != theirs.get(name):
            found.append(f"{name}: {mine.get(name)} and {theirs.get(name)}")
    return found


def result_of(out: Path) -> dict[str, Any]:
    """Checksums of the last checkpoint's tensors, its state, and the lines of metrics.jsonl; all without times."""
    newest = files.candidates(out)[0]
    sums = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["files"]
    result: dict[str, Any] = {name: entry for name, entry in sums.items() if name.endswith(".safetensors")}
    state = files.read(newest).state
    for time_key in ("train_s", "seconds"):
        del state["meter"][time_key]
    result |= {f"state: {key}": value for key, value in state.items()}
    for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kept = {key: value for key, value in row.items() if not key.endswith(TIMES) or key == "padding_share"}
        result[f"metrics.jsonl: step {row['step']}: {', '.join(kept)}"] = kept
    return result


def figures_of(values: list[int]) -> dict[str, float]:
    """Number, median and maximum."""
    return {"number": len(values), "median": statistics.median(values or [0]), "most": max(values, default=0)}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a training at random moments and check what each kill leaves.")
    parser.add_argument("--kills", type=int, default=200, help="Number of kills. (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="New folder to work in.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the moments. (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """The campaign. Returns the exit status."""
    args = parse()
    args.out.mkdir(parents=True)  # fails if it exists
    os.environ.update(HVD_BERT_CACHE=str(args.out / "cache"), OMP_NUM_THREADS="1")
    steps = 2 * SAVE_STEPS * args.kills
    flags = ["--config", "sample", "--max_train_samples", "64", "--max_eval_samples", "4", "--dropout", "0.1"]
    flags += ["--per_device_train_batch_size", "4", "--logging_steps", "1", "--save_steps", str(SAVE_STEPS)]
    rewrites_killed, rewrites_lost = kill_rewrites(flags, args.out)
    flags += ["--max_steps", str(steps), "--eval_strategy", "no"]
    whole, out = args.out / "whole", args.out / "killed"
    let_through([*flags, "--output_dir", str(whole)])

    dice, tally, saved, ended = random.Random(args.seed), Tally(), 0, False
    while tally.kills < args.kills and not ended:
        begun = 0 if dice.random() < 0.1 else dice.randint(1, 3 * SAVE_STEPS)
        delay_s = dice.random() * (0.2 if begun else 0.5)  # half a second: about the time until the first step
        with noting_writes() as unfinished:
            slower_s = SLOWER_S * dice.random() ** 2
            last, ended = train_and_kill([*flags, "--output_dir", str(out)], begun, delay_s, slower_s)
            if not ended:
                tally.kills += 1
                saved = inspect(out, last, saved, unfinished(), tally)
    if ended:
        print(f"The run ended after {tally.kills} kills.", file=sys.stderr)
    succeeded = let_through([*flags, "--output_dir", str(out)])[0] == 0
    differing = differences(whole, out)
    figures = asdict(tally) | {
        "rewrites_killed": rewrites_killed,
        "rewrites_lost": rewrites_lost,
        "save_steps": SAVE_STEPS,
        "steps_lost": figures_of(tally.steps_lost),
        "steps_of_writes": figures_of(tally.steps_of_writes),
        "succeeded": succeeded,
        "steps": steps,
        "differs_from_a_run_never_killed": differing,
    }
    print(json.dumps(figures, indent=1))
    wrong = tally.damaged or tally.went_back or tally.lost_too_many or rewrites_lost or differing or not succeeded
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
