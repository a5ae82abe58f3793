"""What it costs to go on from a checkpoint, by how many steps came before it: nothing is replayed, so the same.

    python benchmarks/resume_cost.py --out DIR

Trains a tiny BERT on the sample and stops at step 10 and at step 10,000; then goes on from each in turn, in a new
process with everything imported, and takes the time until its first step begins.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "parallel")]

from stopping_at import signal_at  # noqa: E402

from hvd_bert.data.prefetch import Prefetcher  # noqa: E402
from hvd_bert.distributed.runner import run_as_rank  # noqa: E402
from hvd_bert.errors import EXIT_STOPPED  # noqa: E402
from hvd_bert.train.__main__ import main as train  # noqa: E402

STEPS = (10, 10_000)


def in_child(words: list[str], stop: int) -> float:
    """Train until step `stop` in a child process; seconds until its first step began."""
    reading, writing = os.pipe()
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        of_step = Prefetcher.of_step

        def telling(self: Prefetcher, step: int) -> object:
            os.write(writing, b"x")  # only the first is read
            return of_step(self, step)

        Prefetcher.of_step = telling  # type: ignore[method-assign, assignment]
        sys.argv = ["hvd_bert.train", *words]
        try:
            with signal_at(stop, 0, signal.SIGTERM):
                run_as_rank(train)
        except SystemExit as end:
            os._exit(int(end.code or 0))
    os.close(writing)
    os.read(reading, 1)
    seconds = time.monotonic() - start
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != EXIT_STOPPED:
        raise SystemExit(f"the training ended with status {status}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to go on from step 10 and from step 10,000.")
    parser.add_argument("--out", type=Path, required=True, help="folder to work in; emptied first")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    sample = REPOSITORY / "hvd_bert" / "sample"
    tiny = shutil.copytree(sample, args.out / "tiny", ignore=shutil.ignore_patterns("*.json", "*.py", "__pycache__"))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    (tiny / "config.json").write_text(json.dumps(json.loads((sample / "config.json").read_text()) | small))
    os.environ.update(HVD_BERT_CACHE=str(args.out / "cache"), OMP_NUM_THREADS="1")
    words = ["--config", "sample", "--config_name", str(tiny), "--max_train_samples", "64", "--no_do_eval"]
    words += ["--max_steps", str(2 * STEPS[-1]), "--per_device_train_batch_size", "1", "--save_steps", "5000"]
    words += ["--logging_steps", "1000"]
    for step in STEPS:
        in_child([*words, "--output_dir", str(args.out / str(step))], step)
    seconds: dict[int, list[float]] = {step: [] for step in STEPS}
    for _ in range(args.repeats):
        for step in STEPS:  # interleaved
            folder = shutil.copytree(args.out / str(step), args.out / "again")
            seconds[step].append(in_child([*words, "--output_dir", str(folder)], step + 1))
            shutil.rmtree(folder)
    ratios = sorted(late / early for early, late in zip(*seconds.values(), strict=True))
    for step, times in seconds.items():
        print(f"from step {step}: median {statistics.median(times):.2f} s, {min(times):.2f} to {max(times):.2f}")
    print(f"ratio: median {statistics.median(ratios):.2f}, {ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs")


if __name__ == "__main__":
    main()
