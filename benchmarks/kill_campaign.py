"""Kills a training at random moments, again and again, and looks at what it left each time.

    python benchmarks/kill_campaign.py --kills 200 --out DIR

Each attempt goes on where the one before was killed. Some are killed while they start, most while they train, many
while a checkpoint is being written (the writer is slowed, or that would be too rare to be tried). In the end the run is
let through, and must equal one that was never killed, to the bit. Prints the figures of
docs/evidence/benchmarks.md; status 1
if anything was lost that should not be.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "parallel")]

import resuming  # noqa: E402  # what makes two runs the same

from hvd_bert.checkpoint import files, resume  # noqa: E402
from hvd_bert.data.prefetch import Prefetcher  # noqa: E402
from hvd_bert.distributed.runner import run_as_rank  # noqa: E402
from hvd_bert.train.__main__ import main as train  # noqa: E402

SAVE_STEPS = 4
SLOWER_S = 0.02  # per file of a checkpoint


@dataclass
class Tally:
    kills: int = 0
    while_starting: int = 0
    while_writing: int = 0
    without_checkpoint_yet: int = 0
    damaged: list[str] = field(default_factory=list)
    not_loadable: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)


def attempt(words: list[str], kill_after: int | None, delay_s: float) -> tuple[int, bool]:
    """Train in a child process; kill it `delay_s` after it began its `kill_after`-th step (None: let it through).

    Returns the last step that it began (0: none), and whether it ended by itself, well.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _become_trainer(words, writing, slow=kill_after is not None)
    os.close(writing)
    begun = last = 0
    deadline = None if kill_after is None else (time.monotonic() + delay_s if kill_after == 0 else float("inf"))
    while True:
        timeout = None if deadline in (None, float("inf")) else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([reading], [], [], timeout)
        if not ready:
            break
        message = os.read(reading, 8)
        if not message:
            break
        last = int.from_bytes(message, "little")
        begun += 1
        if begun == kill_after:
            deadline = time.monotonic() + delay_s
    if ready == []:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    return last, status == 0


def _become_trainer(words: list[str], writing: int, slow: bool) -> None:
    """The child: tells of each step that it begins, writes its checkpoints slowly."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    of_step, fingerprint = Prefetcher.of_step, files._fingerprint

    def telling(self: Prefetcher, step: int) -> object:
        os.write(writing, (step + 1).to_bytes(8, "little"))
        return of_step(self, step)

    def slower(path: Path) -> object:
        time.sleep(SLOWER_S)
        return fingerprint(path)

    Prefetcher.of_step = telling  # type: ignore[method-assign, assignment]
    if slow:
        files._fingerprint = slower  # type: ignore[assignment]
    sys.argv = ["hvd_bert.train", *words]
    try:
        run_as_rank(train)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))


def look(out: Path, last: int, before: int, tally: Tally) -> int:
    """Judge what a killed attempt left; returns the step that the next one will go on from."""
    tally.while_writing += any(out.glob(".partial-checkpoint-*"))
    found = files.candidates(out)
    for folder in found:
        try:
            files.verify(folder)
        except files.CorruptCheckpoint as error:
            tally.damaged.append(str(error))
    if not found:
        tally.without_checkpoint_yet += 1
        saved = 0
    else:
        newest, damage = resume._newest_whole(out)
        tally.not_loadable += damage
        saved = newest.step if newest else 0
    if saved < before:
        tally.not_loadable.append(f"went back from step {before} to {saved}")
    if last:
        tally.steps_lost.append(last - 1 - saved)  # of the step that had begun nothing counts
    else:
        tally.while_starting += 1
    return saved


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a training at random moments; look at what it leaves.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True, help="folder to work in; emptied first")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    os.environ.update(HVD_BERT_CACHE=str(args.out / "cache"), OMP_NUM_THREADS="1")
    steps = 8 * args.kills
    words = ["--config", "sample", "--max_train_samples", "64", "--max_eval_samples", "4", "--max_steps", str(steps)]
    words += ["--per_device_train_batch_size", "4", "--logging_steps", "1", "--save_steps", str(SAVE_STEPS)]
    words += ["--dropout", "0.1", "--eval_strategy", "no"]
    attempt([*words, "--output_dir", str(args.out / "whole")], None, 0.0)

    dice, tally, saved = random.Random(args.seed), Tally(), 0
    out = args.out / "killed"
    while tally.kills < args.kills:
        kill_after = 0 if dice.random() < 0.1 else dice.randint(1, 3 * SAVE_STEPS)
        last, ended = attempt(
            [*words, "--output_dir", str(out)], kill_after, dice.random() * (2.0 if not kill_after else 0.2)
        )
        if ended:
            print(f"ended after {tally.kills} kills", file=sys.stderr)
            break
        tally.kills += 1
        saved = look(out, last, saved, tally)
    _, ended = attempt([*words, "--output_dir", str(out)], None, 0.0)
    differences = resuming.differences(args.out / "whole", out)
    lost = sorted(tally.steps_lost)
    figures = asdict(tally) | {
        "steps_lost": {"median": lost[len(lost) // 2], "most": lost[-1], "save_steps": SAVE_STEPS},
        "ended_well": ended,
        "steps": steps,
        "differs_from_a_run_never_killed": differences,
    }
    print(json.dumps(figures, indent=1))
    bad = tally.damaged or tally.not_loadable or differences or not ended
    return 1 if bad or lost[-1] > SAVE_STEPS else 0


if __name__ == "__main__":
    sys.exit(main())
