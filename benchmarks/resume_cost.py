"""Measures how long a resume takes after few and after many steps.

    python benchmarks/resume_cost.py --out DIR

Trains a tiny BERT on the sample and stops at step 10 and at step 10,000. Then resumes both in turns, each time in a new
process that has imported everything, and measures the time until its first step begins. Prints the medians with their
range, and the ratio of each pair.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
from pathlib import Path

import forked_training
from shared import REPOSITORY, spread

from hvd_bert.errors import EXIT_STOPPED

STEPS = (10, 10_000)
TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}


def train_until(step: int, flags: list[str]) -> float:
    """Train until `step` begins. Returns the seconds until the first step began."""

    def stop(number: int) -> None:
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    start = time.monotonic()
    child, pipe = forked_training.start(flags, before_step=stop)
    forked_training.read_step(pipe)
    seconds = time.monotonic() - start
    while forked_training.read_step(pipe):  # a full pipe would block the training
        pass
    os.close(pipe)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != EXIT_STOPPED:
        raise SystemExit(f"The training ended with status {status} instead of {EXIT_STOPPED}.")
    return seconds


def tiny_model(folder: Path) -> Path:
    """The sample's tokenizer with a model whose steps take next to no time."""
    sample = REPOSITORY / "hvd_bert" / "sample"
    tiny = shutil.copytree(sample, folder / "tiny", ignore=shutil.ignore_patterns("*.json", "*.py", "__pycache__"))
    (tiny / "config.json").write_text(json.dumps(json.loads((sample / "config.json").read_text()) | TINY))
    return tiny


def main() -> None:
    """Train, resume in turns, print."""
    parser = argparse.ArgumentParser(description="Seconds to resume from step 10 and from step 10,000.")
    parser.add_argument("--out", type=Path, required=True, help="New folder to work in.")
    parser.add_argument("--repeats", type=int, default=7, help="Pairs of resumed runs. (default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True)  # fails if it exists
    os.environ.update(HVD_BERT_CACHE=str(args.out / "cache"), OMP_NUM_THREADS="1")
    flags = ["--config", "sample", "--config_name", str(tiny_model(args.out)), "--max_train_samples", "64"]
    flags += ["--max_steps", str(2 * STEPS[-1]), "--per_device_train_batch_size", "1", "--save_steps", "5000"]
    flags += ["--logging_steps", "1000", "--no_do_eval"]
    for step in STEPS:
        train_until(step, [*flags, "--output_dir", str(args.out / str(step))])
    seconds: dict[int, list[float]] = {step: [] for step in STEPS}
    for _ in range(args.repeats):
        for step in STEPS:
            folder = shutil.copytree(args.out / str(step), args.out / "again")
            seconds[step].append(train_until(step + 1, [*flags, "--output_dir", str(folder)]))
            shutil.rmtree(folder)
    for step, times in seconds.items():
        print(f"from step {step}: {spread(times, 2)} s")
    ratios = [late / early for early, late in zip(*seconds.values(), strict=True)]
    print(f"ratio: {spread(ratios, 2)}, {len(ratios)} pairs")


if __name__ == "__main__":
    main()
