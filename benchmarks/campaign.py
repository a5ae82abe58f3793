"""Test long trainings: the cost of kills, damage by kills, growth of memory and time.

    python benchmarks/campaign.py goodput --out DIR --every 60 --duration 600   useful windows/s, with and without kills
    python benchmarks/campaign.py kills --out DIR          200 SIGKILLs at random moments, many during checkpoints
    python benchmarks/campaign.py rank_kills --out DIR     one of two ranks is killed every minute for 60 minutes
    python benchmarks/campaign.py stops --out DIR          100 stops of two ranks by SIGTERM, each resumed
    python benchmarks/campaign.py steps --out DIR          10,000 steps under mpirun: memory, files, threads, CPU time
    python benchmarks/campaign.py evaluations --out DIR    1,000 evaluations, 200 checkpoints: memory, files, CPU time

--number shortens all campaigns except goodput. DIR must not exist. `goodput` also takes the trainer's flags. The other
campaigns print JSON and end with status 1 if "failures" is not empty:

- A run that was killed or stopped must equal an uninterrupted run bit for bit. A kill must not damage a checkpoint or
  cost more than --save_steps steps plus the steps during an interrupted write, and all ranks must end.
- From the second tenth of a long run to the last, the memory of a rank and the CPU time of the fastest steps may grow
  by 2 %; the numbers of open files and threads must not grow.
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
EVERY, BLOCK = 100, 10  # steps between two records; steps per block
# Figure recorded per rank -> function that summarizes a tenth of the records, and maximum ratio of the last tenth to
# the second tenth.
USED: dict[str, tuple[Any, float]] = {
    "cpu_ms_per_step": (min, 1.02),
    "rss_mib": (statistics.median, 1.02),
    "open_files": (max, 1.0),
    "threads": (max, 1.0),
}
# Campaigns that print failures -> default of --number: kills, minutes, stops, steps or evaluations.
NUMBERS = {"kills": 200, "rank_kills": 60, "stops": 100, "steps": 10_000, "evaluations": 1000}


class Recorder(Callback):
    """Records a rank's memory, open files, threads and CPU time every EVERY steps.

    Other programs slow most steps down, so the CPU time per step is that of the fastest block of BLOCK steps.
    """

    def __init__(self, folder: Path) -> None:
        self._file = JsonLines(folder / f"rank{os.environ['OMPI_COMM_WORLD_RANK']}.jsonl")
        self._process = psutil.Process()
        self._times = [time.thread_time()]  # CPU times at the ends of the blocks since the last record

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
        """Train on this rank."""
        api.run(None, world, [self])


def recorded_run(folder: Path, flags: str) -> dict[str, Any]:
    """Train with additional flags under mpirun. Returns failures, and figures per rank in the second and last tenth."""
    words = [*small_run(flags), *tiny_bert(folder), "--output_dir", str(folder / "out")]
    command = ["mpirun", "-np", str(RANKS), "--oversubscribe", "--bind-to", "none", sys.executable, __file__]
    subprocess.run([*command, "rank", str(folder), *words], stdout=subprocess.DEVNULL, check=True)
    figures: dict[str, Any] = {"failures": []}
    for rank in range(RANKS):
        rows = [json.loads(line) for line in (folder / f"rank{rank}.jsonl").open()]
        tenth = len(rows) // 10
        tenths = rows[tenth : 2 * tenth + 1], rows[-tenth - 1 :]  # the first tenth is warm-up
        figures[f"rank {rank}"] = used = {}
        for key, (summary, limit) in USED.items():
            before, after = used[key] = [summary(row[key] for row in lines) for lines in tenths]
            if after > limit * before:
                figures["failures"].append(f"rank {rank}: {key} grew from {before:g} to {after:g}")
    return figures


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line. Returns the campaign's flags, and other flags, which `goodput` passes to the trainer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("campaign", choices=["goodput", *NUMBERS], help="campaign to run")
    parser.add_argument("--out", type=Path, required=True, help="a new folder to work in")
    parser.add_argument("--number", type=int, help=f"number of kills, minutes, ... (default: {NUMBERS})")
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
    # Import only the campaign's own modules: imports take seconds, and forked ranks would inherit their memory.
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
    if sys.argv[1:2] == ["rank"]:  # a rank started by `recorded_run`
        recorder = Recorder(Path(sys.argv[2]))
        del sys.argv[1:3]
        start_rank(recorder.train, command_line.parse)
    sys.exit(main())
