"""What hours of training show: the cost of kills, what they leave, and what grows.

    python benchmarks/campaign.py goodput --out DIR --every 60 --duration 600   useful windows/s, with and without kills
    python benchmarks/campaign.py kills --out DIR          200 SIGKILLs at random moments, many during checkpoints
    python benchmarks/campaign.py rank_kills --out DIR     one of two ranks is killed every minute for 60 minutes
    python benchmarks/campaign.py stops --out DIR          100 stops of two ranks by SIGTERM, each resumed
    python benchmarks/campaign.py steps --out DIR          10,000 steps under mpirun: memory, files, threads, CPU time
    python benchmarks/campaign.py evaluations --out DIR    1,000 evaluations and 200 checkpoints: the same

--number shortens all but the first. DIR must not exist. `goodput` also takes the trainer's flags. The others print JSON
and end with status 1 if "failures" is not empty:

- A run that was killed or stopped must equal one that never was, bit for bit. No kill may damage a checkpoint or cost
  more than --save_steps steps and those taken during the write that it hit, or leave a rank that does not end.
- From the second tenth of a long run to the last, the memory of a rank and the CPU time of its fastest steps may grow
  by 2 %, and its open files and threads not at all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from shared import launch_environment, small_run, tiny_bert

from hvd_bert.config import command_line
from hvd_bert.output.callback import Callback
from hvd_bert.startup import start_rank
from hvd_bert.storage.writing import JsonLines
from hvd_bert.training import api

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World

RANKS = 2
EVERY, BLOCK = 100, 10  # steps between two records; steps of a block, the fastest of which is recorded
# What a rank uses: the summary of a tenth of its records, and how much the last tenth's may be of the second's.
USED: dict[str, tuple[Any, float]] = {
    "cpu_ms_per_step": (min, 1.02),
    "rss_mib": (statistics.median, 1.02),
    "open_files": (max, 1.0),
    "threads": (max, 1.0),
}
# The campaigns that print failures, and how many kills, minutes, stops, steps and evaluations they take.
NUMBERS = {"kills": 200, "rank_kills": 60, "stops": 100, "steps": 10_000, "evaluations": 1000}


class Recorder(Callback):
    """Records what its rank uses, every EVERY steps.

    Other programs slow most steps down. The fastest block of steps shows what a step takes without them.
    """

    def __init__(self, folder: Path) -> None:
        self._file = JsonLines(folder / f"rank{os.environ['OMPI_COMM_WORLD_RANK']}.jsonl")
        self._process = psutil.Process()
        self._times = [time.thread_time()]  # CPU time at the end of each block since the last record

    def on_step(self, step: int) -> None:
        if step % BLOCK == 0:
            self._times.append(time.thread_time())
        if step % EVERY:
            return
        fastest_s = min(after - before for before, after in itertools.pairwise(self._times)) / BLOCK
        self._times = self._times[-1:]
        used = {"cpu_ms_per_step": 1000 * fastest_s, "rss_mib": self._process.memory_info().rss / 2**20}
        used |= {"open_files": self._process.num_fds(), "threads": self._process.num_threads()}
        self._file.write({"step": step, **used})

    def train(self, world: World) -> None:
        """A whole run on one rank."""
        api.run(None, world, [self])


def recorded_run(folder: Path, flags: str) -> dict[str, Any]:
    """Train with these further flags under mpirun. Returns what the ranks used."""
    words = [*small_run(flags), *tiny_bert(folder), "--output_dir", str(folder / "out")]
    command = ["mpirun", "-np", str(RANKS), "--oversubscribe", "--bind-to", "none", sys.executable, __file__]
    subprocess.run([*command, "rank", str(folder), *words], stdout=subprocess.DEVNULL, check=True)
    figures: dict[str, Any] = {"failures": []}
    for rank in range(RANKS):
        rows = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").open()]
        tenth = len(rows) // 10
        parts = rows[tenth : 2 * tenth + 1], rows[-tenth - 1 :]  # the first tenth is warm-up
        figures[f"rank {rank}"] = used = {}
        for key, (summary, limit) in USED.items():
            before, after = used[key] = [summary(row[key] for row in part) for part in parts]
            if after > limit * before:
                figures["failures"].append(f"rank {rank}: {key} grew from {before:g} to {after:g}")
    return figures


def parse() -> tuple[argparse.Namespace, list[str]]:
    """The program's flags, and those of the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("campaign", choices=["goodput", *NUMBERS], help="what to run")
    parser.add_argument("--out", type=Path, required=True, help="a new folder to work in")
    parser.add_argument("--number", type=int, help=f"of kills, minutes, ...: {NUMBERS} by default")
    goodput = parser.add_argument_group("goodput")
    strategies = ["elastic", "horovod", "ddp", "fsdp"]
    goodput.add_argument("--strategies", type=lambda text: text.split(","), default=strategies, metavar="NAME,...")
    goodput.add_argument("--ranks", type=int, default=2)
    goodput.add_argument("--global_batch", type=int, default=16, help="windows per step")
    goodput.add_argument("--every", type=float, default=60.0, help="seconds per kill, in the middle half of each")
    goodput.add_argument("--duration", type=float, default=3600.0, help="seconds per strategy, from the first step on")
    flags, rest = parser.parse_known_args()
    if rest and flags.campaign != "goodput":
        parser.error(f"unknown: {' '.join(rest)}")
    return flags, rest


def main() -> int:
    """Run a campaign. Returns the exit status."""
    flags, rest = parse()
    folder, number = flags.out.absolute(), flags.number or NUMBERS.get(flags.campaign, 0)
    folder.mkdir(parents=True)  # fails if it exists
    os.environ.update(launch_environment() | {"HVD_BERT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"})
    # Each campaign imports what it trains with: seconds, and memory that its ranks would share.
    if flags.campaign == "goodput":
        import campaign_goodput

        campaign_goodput.measure(folder, flags, rest)
        return 0
    if flags.campaign == "steps":
        figures = recorded_run(folder, f"--max_steps {number} --save_steps 0 --eval_strategy no")
    elif flags.campaign == "evaluations":
        figures = recorded_run(folder, f"--max_steps {number} --save_steps 5 --eval_strategy steps --eval_steps 1")
    else:
        import campaign_kills

        figures = getattr(campaign_kills, flags.campaign)(folder, number)
    print(json.dumps(figures, indent=1))
    return int(bool(figures["failures"]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:  # started by `recorded_run`
        recorder = Recorder(Path(sys.argv[2]))
        del sys.argv[1:3]
        start_rank(recorder.train, command_line.parse)
    sys.exit(main())
