"""Starts, trains, saves, stops and resumes a tiny model on many ranks of one machine, and measures what a rank costs.

    python benchmarks/many_ranks.py --ranks 1 2 4 8 16 32 --out DIR
    python benchmarks/many_ranks.py --ranks 2 32 --controller gloo --out DIR

Each number of ranks is one launch by `horovodrun`, of 10 steps of one window per rank, with the windows cached. Prints
the table of docs/evidence/many-ranks.md: means over the ranks. With `--resume_on M` the largest number of ranks is also
stopped by SIGTERM after its first step, with `--resume_on` ranks resumed, and must end with status 0. CPU times hold on
a busy machine, wall times only on an idle one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import compare_peers
from shared import REPOSITORY, markdown_table

from hvd_bert.errors import EXIT_STOPPED, UserError

RANK = Path(__file__).with_name("many_ranks_rank.py")
STEPS = 10
LIMIT_S = 600.0  # for each part of a stopped run
FLAGS = "--config sample --max_train_samples 256 --max_eval_samples 32 --dropout 0 --logging_steps 1"
HEAD = [
    "ranks", "world joined, s", "first step, s", "CPU per rank until joined, s", "until the first step, s",
    "whole run, s", "whole run relative to 2 ranks", "memory per rank, MiB", "threads", "open descriptors",
    "files opened at start", "collectives at start",
]  # fmt: skip


def command(ranks: int, controller: str, folder: Path, out: Path, more: str) -> list[str]:
    """horovodrun with ranks that record themselves in `folder`."""
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks), "-H", f"localhost:{ranks}"]
    rank = [sys.executable, str(RANK), str(folder), *FLAGS.split(), *more.split(), "--output_dir", str(out)]
    return [*horovodrun, f"--{controller}", *rank]


def environment(out: Path) -> dict[str, str]:
    """One thread per rank, and windows cached by the first run."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HVD_BERT_CACHE": str(out / "cache"), "PYTHONPATH": str(REPOSITORY)}


def measure(ranks: int, controller: str, out: Path) -> list[list[dict[str, Any]]]:
    """The records of every rank of a run. Fails with its output."""
    folder = out / f"{controller}-{ranks}"
    folder.mkdir(parents=True)
    more = f"--max_steps {STEPS} --per_device_train_batch_size 1 --save_steps 0"
    start = time.time()
    done = subprocess.run(
        command(ranks, controller, folder, folder / "out", more),
        env=environment(out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{done.stdout}\n{ranks} ranks over {controller} ended with status {done.returncode}.")
    records = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    for record in records:
        for mark in record:
            mark["wall_s"] = mark["time"] - start
    return records


def cpu_s(marks: Sequence[dict[str, Any]]) -> float:
    """CPU time per rank until a mark."""
    return fmean(mark["cpu_s"] for mark in marks)


def row(records: Sequence[list[dict[str, Any]]], two: Sequence[list[dict[str, Any]]] | None) -> list[str]:
    """A row of the table. `two`: the records of 2 ranks, to compare with."""
    joined, first, end = (list(marks) for marks in zip(*records, strict=True))
    cells = [f"{max(mark['wall_s'] for mark in marks):.1f}" for marks in (joined, first)]
    cells += [f"{cpu_s(marks):.2f}" for marks in (joined, first, end)]
    cells.append(f"{cpu_s(end) / cpu_s([marks[-1] for marks in two]):.2f}" if two else "not measured")
    cells.append(f"{fmean(mark['pss_mib'] for mark in first):.0f}")
    cells += [str(max(mark[name] for mark in first)) for name in ("threads", "descriptors", "opened", "collectives")]
    return [str(len(records)), *cells]


def end(running: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher, which terminates its ranks, or kill it."""
    running.terminate()
    try:
        running.wait(30)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def stop_and_resume(ranks: int, resume_on: int, controller: str, out: Path) -> None:
    """Stop a run by a signal after its first step, and resume it on another number of ranks."""
    folder = out / f"{controller}-{ranks}-stopped"
    folder.mkdir()
    more = f"--max_steps {3 * STEPS} --global_batch {ranks}"
    log = folder / "out" / "metrics.jsonl"
    running = subprocess.Popen(command(ranks, controller, folder, folder / "out", more), env=environment(out))
    deadline = time.monotonic() + LIMIT_S
    while running.poll() is None and not (log.exists() and log.read_text(encoding="utf-8").count('"loss"')):
        if time.monotonic() > deadline:
            end(running)
            raise SystemExit(f"The run logged no step in {LIMIT_S:.0f} s.")
        time.sleep(0.1)
    signalled = time.monotonic()
    running.send_signal(signal.SIGTERM)
    try:
        status = running.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        end(running)
        raise SystemExit(f"SIGTERM did not end the run in {LIMIT_S:.0f} s.") from None
    seconds = time.monotonic() - signalled
    print(f"{ranks} ranks over {controller}: SIGTERM ended them after {seconds:.1f} s with status {status}")
    if not (folder / "out" / "latest").exists():
        raise SystemExit(f"The stopped run wrote no checkpoint (status {status}; a rank's is {EXIT_STOPPED}).")
    saved = (folder / "out" / "latest").read_text(encoding="utf-8").strip()
    words, printed = command(resume_on, controller, folder, folder / "out", more), folder / "resumed.log"
    try:
        compare_peers.run(words, environment(out), printed, LIMIT_S)
    except UserError as error:
        raise SystemExit(f"The resumed run failed: {error}") from None
    text = printed.read_text(encoding="utf-8", errors="replace")
    if saved not in text or not (folder / "out" / "train_results.json").exists():
        raise SystemExit(f"{text}\nThe run was not resumed from {saved}, or did not complete.")
    print(f"resumed from {saved} on {resume_on} ranks, and completed")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Train on many ranks of one machine, and measure what a rank costs.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="(default: %(default)s)")
    parser.add_argument("--controller", choices=["mpi", "gloo"], default="mpi", help="(default: %(default)s)")
    parser.add_argument("--resume_on", type=int, help="Stop the largest world, and resume on as many ranks.")
    parser.add_argument("--out", type=Path, required=True, help="New folder to work in.")
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    measure(1, args.controller, args.out / "warm-up")  # fills the cache of windows
    (args.out / "warm-up" / "cache").rename(args.out / "cache")
    measured = {}
    for ranks in args.ranks:
        measured[ranks] = measure(ranks, args.controller, args.out)
        print(row(measured[ranks], measured.get(2)), file=sys.stderr, flush=True)
    print(markdown_table(HEAD, [row(records, measured.get(2)) for records in measured.values()]), flush=True)
    if args.resume_on:
        stop_and_resume(max(args.ranks), args.resume_on, args.controller, args.out)


if __name__ == "__main__":
    main()
