"""Long runs of a tiny BERT on 2 ranks: what grows, and whether interruptions leave a trace.

    python benchmarks/long_runs.py steps --out DIR          10,000 steps: memory, files, threads, step time, logs
    python benchmarks/long_runs.py evaluations --out DIR    1,000 evaluations and 200 checkpoints: the same
    python benchmarks/long_runs.py resumes --out DIR        100 stops by SIGTERM, each resumed
    python benchmarks/long_runs.py kills --out DIR          a rank is killed every minute for an hour

The first two start their ranks with mpirun and compare the first steps after the warm-up with the last ones. The other
two compare the run with one that was never interrupted, bit for bit. Each prints its figures as JSON (docs/evidence/
long-runs.md); the exit status is 1 if a limit is exceeded or the runs differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked_training
import psutil
from kill_campaign import differences
from shared import REPOSITORY, launch_environment

from hvd_bert.distributed.runner import run_as_rank
from hvd_bert.training.api import main as train

RANKS = 2
EVERY, BLOCK = 100, 10  # steps between two records; steps of a block, the fastest of which is recorded
MAX_GROWTH = 0.02  # of memory and of a step's time, from the first steps after the warm-up to the last ones
END_S = 60.0  # for a rank to end by itself after the other one was killed
LIMIT_S = 600.0  # without a step: the run hangs
# 8 steps per epoch, so that every 1,000 steps train on the same windows.
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
FLAGS = "--config sample --max_train_samples 64 --max_eval_samples 4 --per_device_train_batch_size 4"
FLAGS += " --dropout 0.1 --logging_steps 10"


class Recorder:
    """Appends what this process uses to a file, every EVERY steps; rank 0 also the sizes of the run's files.

    Other programs slow most steps down. The fastest block of steps shows what a step takes without them.
    """

    def __init__(self, folder: Path, rank: int, out: Path) -> None:
        self._file = (folder / f"rank{rank}.jsonl").open("a", encoding="utf-8")
        self._out, self._process = (out if rank == 0 else None), psutil.Process()
        # At the beginning of each block since the last record.
        self._times = [(time.perf_counter(), time.thread_time())]

    def __call__(self, step: int) -> None:
        if step % BLOCK == 1:
            self._times.append((time.perf_counter(), time.thread_time()))
        if step % EVERY != 1:
            return
        blocks = [(wall - before[0], cpu - before[1]) for before, (wall, cpu) in itertools.pairwise(self._times)]
        wall_s, cpu_s = (min(values) / BLOCK for values in zip(*blocks, strict=True))
        row: dict[str, Any] = {"step": step - 1, "fastest_wall_s": wall_s, "fastest_training_cpu_s": cpu_s}
        self._times = self._times[-1:]
        row |= {"wall_s": time.perf_counter(), "training_cpu_s": time.thread_time()}
        row |= {"cpu_s": time.process_time(), "rss": self._process.memory_info().rss}
        row |= {"open_files": self._process.num_fds(), "threads": self._process.num_threads()}
        self._file.write(json.dumps(row | ({"files": sizes(self._out)} if self._out else {})) + "\n")
        self._file.flush()


def sizes(out: Path) -> dict[str, int]:
    """Bytes of a run's files and folders."""
    found: dict[str, int] = {}
    for path in sorted(out.rglob("*")):
        if path.is_file():
            name = path.relative_to(out).parts[0]
            found[name] = found.get(name, 0) + path.stat().st_size
    return found


def flags_of(out: Path, more: str) -> list[str]:
    """The run's flags; writes its model's configuration next to its folder."""
    model = out.parent / "model"
    model.mkdir(exist_ok=True)
    config = json.loads((REPOSITORY / "hvd_bert" / "sample" / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | SHAPE), encoding="utf-8")
    return [*FLAGS.split(), "--config_name", str(model), "--output_dir", str(out), *more.split()]


def as_rank(records: Path, flags: Sequence[str]) -> None:
    """Train as a rank of mpirun, recorded."""
    rank, out = int(os.environ["OMPI_COMM_WORLD_RANK"]), Path(flags[flags.index("--output_dir") + 1])
    forked_training.call_before_each_step(Recorder(records, rank, out))
    sys.argv = ["hvd_bert.train", *flags]
    run_as_rank(train)


def recorded_run(folder: Path, more: str) -> dict[str, Any]:
    """Train with these further flags under mpirun; what `growth` makes of the records, per rank."""
    out = folder / "out"
    command = ["mpirun", "-np", str(RANKS), "--oversubscribe", "--bind-to", "none", sys.executable, __file__]
    subprocess.run([*command, "as_rank", str(folder), *flags_of(out, more)], stdout=subprocess.DEVNULL, check=True)
    rows = [[json.loads(line) for line in (folder / f"rank{rank}.jsonl").open()] for rank in range(RANKS)]
    lines = {"metrics.jsonl": (out / "metrics.jsonl").read_text(encoding="utf-8").count("\n")}
    return {"ranks": [growth(of_rank) for of_rank in rows], "bytes_per_step": log_growth(rows[0]), "lines": lines}


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a process used in the second tenth of its records, the first being warm-up, and in the last tenth."""
    tenth = len(rows) // 10
    parts = rows[tenth : 2 * tenth + 1], rows[-tenth - 1 :]
    found: dict[str, Any] = {"steps": [[part[0]["step"], part[-1]["step"]] for part in parts]}
    for key in ("wall_s", "training_cpu_s", "cpu_s"):
        per_step = [[(b[key] - a[key]) / EVERY * 1000 for a, b in itertools.pairwise(part)] for part in parts]
        found[key.replace("_s", "_ms_per_step")] = compared([statistics.median(part) for part in per_step])
    for key in ("fastest_wall_s", "fastest_training_cpu_s"):
        found[key.replace("_s", "_ms_per_step")] = compared(
            [1000 * min(row[key] for row in part[1:]) for part in parts]
        )
    found["rss_mib"] = compared([statistics.median(row["rss"] for row in part) / 2**20 for part in parts])
    for key in ("open_files", "threads"):
        found[key] = [max(row[key] for row in part) for part in parts]
    return found


def compared(values: Sequence[float]) -> dict[str, float]:
    """The first and the last value, and by which share it grew."""
    first, last = values
    return {"first": round(first, 3), "last": round(last, 3), "growth": round(last / first - 1, 4)}


def log_growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Bytes per step by which each of a run's files grew after its warm-up."""
    first, last = rows[len(rows) // 10], rows[-1]
    steps = last["step"] - first["step"]
    grown = {name: (size - first["files"].get(name, 0)) / steps for name, size in last["files"].items()}
    return {name: round(value, 1) for name, value in grown.items() if value and not name.startswith("checkpoint-")}


def exceeded(figures: Mapping[str, Any]) -> list[str]:
    """The limits that a recorded run does not keep. Other times have none: other programs share the machine."""
    found = []
    for rank, used in enumerate(figures["ranks"]):
        for key in ("fastest_training_cpu_ms_per_step", "rss_mib"):
            if not used[key]["growth"] <= MAX_GROWTH:
                found.append(f"rank {rank}: {key} grew by {used[key]['growth']:.1%}")
        for key in ("open_files", "threads"):
            if used[key][1] > used[key][0]:
                found.append(f"rank {rank}: {key} grew from {used[key][0]} to {used[key][1]}")
    return found


def attempt(flags: Sequence[str], before_step: Callable[[int], None] | None, kill_after_s: float | None = None) -> str:
    """Train on RANKS ranks until they end, or kill one after `kill_after_s`. Returns "ended", "stopped" or "killed".

    The other ranks must end by themselves after a kill, or this program fails.
    """
    ranks = dict(forked_training.start_ranks(flags, RANKS, before_step))
    kill_at = time.monotonic() + (kill_after_s or float("inf"))
    killed, silent_since = False, time.monotonic()
    pipes = {pipe: child for child, pipe in ranks.items()}
    statuses = []
    while pipes:
        now = time.monotonic()
        if now - silent_since > (END_S if killed else LIMIT_S):
            for child in pipes.values():
                os.kill(child, signal.SIGKILL)
            raise SystemExit(f"The run hangs: {'a rank outlived a killed one' if killed else 'no step'}.")
        if now >= kill_at and not killed:
            os.kill(random.choice(list(pipes.values())), signal.SIGKILL)
            killed, silent_since = True, now
        wait_s = min(1.0, max(0.0, kill_at - now)) if not killed else 1.0
        for pipe in select.select(list(pipes), [], [], wait_s)[0]:
            step = forked_training.read_step(pipe)
            if not killed:
                silent_since = time.monotonic()
            if step is None:
                os.close(pipe)
                statuses.append(os.waitstatus_to_exitcode(os.waitpid(pipes.pop(pipe), 0)[1]))
    if killed:
        return "killed"
    if set(statuses) - {0, 75}:
        raise SystemExit(f"The training failed: statuses {statuses}.")
    return "stopped" if 75 in statuses else "ended"


def resumed_run(folder: Path, resumes: int, steps_each: int) -> dict[str, Any]:
    """A run that SIGTERM stops every `steps_each` steps, and one that nothing stops."""
    total = (resumes + 1) * steps_each
    more = f"--max_steps {total} --save_steps {total} --eval_strategy no"  # and at each stop
    whole, out = flags_of(folder / "whole", more), flags_of(folder / "out", more)
    attempt(whole, None)

    def stop(step: int) -> None:
        if step % steps_each == 0 and step < total:
            os.kill(os.getpid(), signal.SIGTERM)

    ends: list[str] = []
    while not ends or ends[-1] == "stopped":
        ends.append(attempt(out, stop))
    return {"resumes": len(ends) - 1, "ended": ends[-1]} | compare(folder)


def killed_run(folder: Path, minutes: int, pace_s: float) -> dict[str, Any]:
    """A run in which a random rank is killed every minute, and one in which none is. `pace_s`: added to each step."""
    steps = int(60 * minutes / pace_s * 0.9)  # does not end earlier, since starts take time, and kills cost steps
    more = f"--max_steps {steps} --save_steps 20 --eval_strategy steps --eval_steps 50"
    whole, out = flags_of(folder / "whole", more), flags_of(folder / "out", more)
    uninterrupted = multiprocessing.get_context("fork").Process(target=attempt, args=(whole, None))
    uninterrupted.start()
    start = time.monotonic()
    ends: list[str] = []
    while not ends or ends[-1] == "killed":
        due = time.monotonic() - start < 60 * minutes
        ends.append(attempt(out, (lambda step: time.sleep(pace_s)) if due else None, 60.0 if due else None))
        print(f"{time.monotonic() - start:.0f} s: {ends[-1]}, {newest(folder / 'out')}", file=sys.stderr, flush=True)
    uninterrupted.join()
    figures = {"kills": ends.count("killed"), "minutes": round((time.monotonic() - start) / 60, 1), "steps": steps}
    return figures | compare(folder)


def newest(out: Path) -> str:
    """The name of the newest checkpoint."""
    latest = out / "latest"
    return latest.read_text(encoding="utf-8").strip() if latest.exists() else "no checkpoint yet"


def compare(folder: Path) -> dict[str, Any]:
    """Where the run differs from the one that was never interrupted, and how large the files of both are."""
    logs = {}
    for name in ("whole", "out"):
        found = sizes(folder / name)
        logs[name] = {file: found.get(file, 0) for file in ("metrics.jsonl", "events.jsonl", "tb")}
    files = sum(1 for _ in (folder / "out" / "tb").iterdir())
    return {"differs": differences(folder / "whole", folder / "out"), "log_bytes": logs, "tensorboard_files": files}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Long runs of a tiny BERT on 2 ranks.")
    parser.add_argument("campaign", choices=("steps", "evaluations", "resumes", "kills"))
    parser.add_argument("--out", type=Path, required=True, help="New folder to work in.")
    parser.add_argument("--steps", type=int, default=10_000, help="Of the first campaign. (default: %(default)s)")
    parser.add_argument("--evaluations", type=int, default=1000, help="Of the second. (default: %(default)s)")
    parser.add_argument("--resumes", type=int, default=100, help="Of the third. (default: %(default)s)")
    parser.add_argument("--minutes", type=int, default=60, help="Of the fourth. (default: %(default)s)")
    parser.add_argument("--pace_s", type=float, default=0.4, help="Added to its steps. (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    """The campaign. Returns the exit status."""
    if sys.argv[1:2] == ["as_rank"]:
        as_rank(Path(sys.argv[2]), sys.argv[3:])
    args = parse()
    folder = args.out.absolute()
    folder.mkdir(parents=True)  # fails if it exists
    os.environ.update(launch_environment() | {"HVD_BERT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"})
    if args.campaign == "kills":
        os.environ["HOROVOD_CYCLE_TIME"] = "5"  # an hour of polling once a millisecond would take a core
    if args.campaign == "steps":
        figures = recorded_run(folder, f"--max_steps {args.steps} --save_steps 0 --eval_strategy no")
    elif args.campaign == "evaluations":
        often = f"--eval_strategy steps --eval_steps 1 --save_steps 5 --max_steps {args.evaluations}"
        figures = recorded_run(folder, often)
    elif args.campaign == "resumes":
        figures = resumed_run(folder, args.resumes, 10)
    else:
        figures = killed_run(folder, args.minutes, args.pace_s)
    broken = exceeded(figures) if "ranks" in figures else figures["differs"]
    print(json.dumps(figures | {"exceeded": broken}, indent=1))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
