"""A step averaged by Horovod beside the same step by torch's DistributedDataParallel: the ratio of their times.

    python benchmarks/horovod_and_ddp.py --ranks 2 --rounds 4 -- --model MODEL --steps 16

After `--` come flags of `python -m hvd_bert.bench`, which measures: the trainer's own loop under `--strategy horovod`
and `--strategy ddp`, the same launcher, windows, model, loss and threads. The two take turns, each in fresh processes;
in every second round the other goes first. Their losses must agree, or nothing is printed. Prints the ratio of the
steps' medians of a round: the median over the rounds, and the range.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
LOSS_TOLERANCE = 1e-3  # of the losses, relative
SIDES = ("horovod", "ddp")


def measure(strategy: str, args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """What the benchmark says of one side."""
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(REPOSITORY)}
    launcher = [str(Path(sys.executable).with_name("horovodrun")), f"--{args.controller}", "-np", str(args.ranks)]
    bench = [sys.executable, "-m", "hvd_bert.bench", "--strategy", strategy, "--json", str(out), *args.flags]
    subprocess.run([*launcher, *bench], env=env, check=True, stdout=sys.stderr)
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description="Horovod's step over DDP's.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("--controller", choices=["mpi", "gloo"], default="mpi", help="what Horovod talks through")
    parser.add_argument("flags", nargs="*", help="of python -m hvd_bert.bench")
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            order = SIDES if number % 2 == 0 else SIDES[::-1]
            found = {side: measure(side, args, Path(folder) / f"{side}.json") for side in order}
            losses = [found[side]["loss"] for side in SIDES]
            if abs(losses[0] - losses[1]) > LOSS_TOLERANCE * abs(losses[1]):
                raise SystemExit(f"The losses differ: {losses[0]} and {losses[1]}. Nothing is compared.")
            figures = {side: found[side]["figures"] for side in SIDES}
            rounds.append(
                {f"{side}_s": figures[side]["step_s"]["median"] for side in SIDES}
                | {f"{side}_exposed": figures[side]["exposed_comm_share"]["median"] for side in SIDES}
            )
            print(rounds[-1], file=sys.stderr)
    ratios = sorted(each["horovod_s"] / each["ddp_s"] for each in rounds)
    ratio = {"median": median(ratios), "range": [ratios[0], ratios[-1]]}
    print(json.dumps({"rounds": rounds, "horovod_over_ddp": ratio}, indent=1))


if __name__ == "__main__":
    main()
