"""Measure goodput: the useful windows per second of a training whose ranks are killed, and of a training without kills.

`python benchmarks/campaign.py goodput` starts this file as a rank, with the arguments NOTES TRAINER-FLAGS...
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from shared import machine, markdown_table

from hvd_bert.config import command_line
from hvd_bert.distributed import launchers
from hvd_bert.distributed.launchers import LaunchOptions
from hvd_bert.output.callback import Callback
from hvd_bert.startup import start_rank
from hvd_bert.storage.writing import JsonLines
from hvd_bert.tools.runs.launching import program_path
from hvd_bert.tools.runs.one_run import failure_in, start_and_wait
from hvd_bert.tools.runs.trainer_flags import with_defaults
from hvd_bert.training import api

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World
    from hvd_bert.tasks.base import Task

RANK = str(Path(__file__).resolve())
STRATEGIES = {"elastic": "horovod", "horovod": "horovod", "ddp": "ddp", "fsdp": "fsdp"}  # name -> --strategy
HOSTS = ("localhost", "127.0.0.1")  # two names of this host: Horovod elastic stops using the host of a lost rank
MAX_WHOLE_S = 30.0  # maximum duration of a training without kills
STEPS = 10**6  # more steps than any training reaches
USEFUL, DETECTION, RESTART, REPEATED = PARTS = ("useful_s", "detection_s", "restart_s", "repeated_s")
LOST = {DETECTION: "detection", RESTART: "restart", REPEATED: "repeated steps"}


class Notes(Callback):
    """A file of timed notes.

    Each rank notes its start and failure. Rank 0 also notes the begin and the steps of each world.
    """

    def __init__(self, path: Path) -> None:
        self._lines, self._writes = JsonLines(path), False
        self.add("started")

    def add(self, what: str, **values: Any) -> None:
        """Append a line with the time by this host's monotonic clock."""
        self._lines.write({"time": time.monotonic(), "what": what, **values})

    def on_start(self, task: Task, world: World) -> None:
        self._writes = world.rank == 0
        if self._writes and task.plan:
            self.add("begin", windows=task.plan.num_windows)

    def on_step(self, step: int) -> None:
        if self._writes:
            self.add("step", step=step)

    def train(self, world: World) -> None:
        """Train on this rank."""
        try:
            api.run(None, world, [self])
        except Exception:
            self.add("noticed")  # most likely, another rank was lost
            raise


def read(path: Path) -> list[dict[str, Any]]:
    """Read the notes, sorted by time. Ignores an incomplete last line."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: note["time"])


def account(notes: Sequence[Mapping[str, Any]], global_batch: int, duration_s: float) -> list[dict[str, Any]]:
    """Divide the time since the begin of the first step into PARTS.

    Returns a row for the time before the first kill, and a row per kill. A row's `windows` counts the windows of useful
    steps.

    The time of a step is useful when the step finishes for the first time. It is repeated when the step had already
    finished before, or when a kill interrupts the step. Detection lasts from a kill until a rank or the launcher fails;
    a step that the other ranks finish in the meantime is useful.

    `notes`: notes of the ranks, of kills, and of the launcher's end.
    """
    first = next(note for note in notes if note["what"] == "begin")
    start, epoch = first["time"], first["windows"]
    row = {"repeated_steps": 0, "windows": 0, **dict.fromkeys(PARTS, 0.0)}
    rows, now, last, cut_at, step = [{"at_s": 0.0, **row}], RESTART, start, start, 0

    def spend(part: str, until: float) -> None:
        nonlocal last
        rows[-1][part] += until - last
        last = until

    counted = [note for note in notes if start <= note["time"] <= start + duration_s]
    for note in [*counted, {"what": "over", "time": start + duration_s}]:
        what, at = note["what"], note["time"]
        if what == "step":
            again = note["step"] <= step
            spend(REPEATED if again else USEFUL, at)
            for number in range(step, note["step"]):
                done = number % math.ceil(epoch / global_batch) * global_batch
                rows[-1]["windows"] += min(global_batch, epoch - done)
            step, cut_at = max(step, note["step"]), at
            if now == USEFUL:
                rows[-1]["repeated_steps"] += again
                rows[-1].setdefault("next_step_s", at - start - rows[-1]["at_s"])
        elif what != "started" or now != USEFUL:  # ignore a rank that starts later than the others
            if now == DETECTION:
                spend(REPEATED, cut_at)
            if now != USEFUL or what == "over":
                spend(now, at)
            if what == "kill":
                rows.append({"at_s": at - start, **row})
                cut_at = at
            now = {"kill": DETECTION, "begin": USEFUL}.get(what, RESTART)
    return rows


class Over(Exception):
    """Ends a training that has lasted long enough or does not start."""


@dataclass
class Training:
    """A command that trains on this host.

    `kills`: for each kill, the seconds after the begin of the first step, and a number from 0 to 1 that selects the
    rank.
    """

    command: Sequence[str]
    log: Path
    notes: Path
    kills: list[tuple[float, float]]
    duration: float
    start_s: float = 300.0  # maximum time until the first step

    def run(self) -> None:
        """Train for `duration` s after the begin of the first step.

        Raises SystemExit if no step begins within `start_s` s.
        """
        self.end, self.begin = time.monotonic() + self.start_s, 0.0
        notes = Notes(self.notes)
        with self.log.open("w", encoding="utf-8") as log, suppress(Over):
            print(f"$ {shlex.join(self.command)}", file=log, flush=True)
            while True:  # start the launcher again whenever it ends, as a job script does
                start_and_wait(self.command, os.environ, log, math.inf, lambda: self._watch(notes))
                notes.add("ended")
                if not self.begin or time.monotonic() > self.end:
                    break
        if not self.begin:
            raise SystemExit(f"{self.log}: {failure_in(self.log)}")

    def _watch(self, notes: Notes) -> None:
        """Kill a rank if a kill is due within a second. Called every second. Raises Over once the time is up."""
        if not self.begin:
            self.begin = next((note["time"] for note in read(self.notes) if note["what"] == "begin"), 0.0)
            self.end = self.begin + self.duration if self.begin else self.end
        now = time.monotonic()
        if now > self.end:
            raise Over
        if self.begin and self.kills and self.begin + self.kills[0][0] < now + 1:
            time.sleep(max(0.0, self.begin + self.kills[0][0] - now))
            ranks = running_ranks()
            if ranks:  # if no rank is running, the next call kills one
                notes.add("kill")
                ranks[int(self.kills.pop(0)[1] * len(ranks))].kill()


def running_ranks() -> list[psutil.Process]:
    """Return the ranks among this process's descendants, without the ranks' own child processes."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process has ended
            if RANK in process.cmdline()[:4]:  # in a launcher's command, RANK comes later
                found[process] = process.ppid()
    return [process for process, parent in found.items() if parent not in {rank.pid for rank in found}]


def kill_times(every: float, duration: float) -> list[tuple[float, float]]:
    """Return the `kills` of a training: one in the middle half of each `every` s, equal for all strategies."""
    dice = random.Random(0)
    numbers = range(math.ceil(duration / every))
    kills = [(every * (number + dice.uniform(0.25, 0.75)), dice.random()) for number in numbers]
    return [kill for kill in kills if kill[0] < duration]


def launch(name: str, folder: Path, ranks: int, train: Sequence[str]) -> list[str]:
    """Return the command that starts a training. `name`: key of STRATEGIES. `train`: command that each rank runs."""
    if name in ("ddp", "fsdp"):
        return launchers.torchrun(LaunchOptions(train, ranks, extra=[f"--max-restarts={STEPS}"]))
    extra = []
    if name == "elastic":
        script = folder / "hosts.sh"
        slots = zip(HOSTS, (math.ceil(ranks / 2), ranks // 2), strict=True)
        script.write_text("#!/bin/sh\n" + "".join(f"echo {host}:{number}\n" for host, number in slots))
        script.chmod(0o755)
        extra = ["--min-np", "1", "--max-np", str(ranks), "--network-interfaces", "lo"]
        extra += ["--blacklist-cooldown-range", "1", "1", "--host-discovery-script", str(script)]
    program, *words = launchers.horovodrun(LaunchOptions(train, ranks, extra=extra))
    return [program_path(program) or program, *words]


def measured(name: str, folder: Path, flags: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """Measure a strategy without and with kills. Returns the strategy's entry in goodput.json."""
    accounts = []
    kills = kill_times(flags.every, flags.duration)
    for label, times, duration in (("whole", [], min(flags.duration, MAX_WHOLE_S)), ("killed", kills, flags.duration)):
        out, log, notes = (folder / f"{name}-{label}{suffix}" for suffix in ("", ".log", ".jsonl"))
        own = [f"--strategy={STRATEGIES[name]}", f"--elastic={name == 'elastic'}", f"--max_steps={STEPS}"]
        own += [f"--per_device_train_batch_size={flags.global_batch // flags.ranks}", f"--output_dir={out}"]
        words = command_line.override_argv(with_defaults(["--save_steps=50", *rest], threads=1), own)
        command = launch(name, folder, flags.ranks, [sys.executable, RANK, str(notes), *words])
        Training(command, log, notes, times, duration).run()
        accounts.append(account(read(notes), flags.global_batch, duration))
    (whole,), killed = accounts
    rate, without_kills = sum(row["windows"] for row in killed) / flags.duration, whole["windows"] / whole[USEFUL]
    spent = {part: sum(row[part] for row in killed) for part in PARTS}
    row = {"windows_per_s": rate, "without_kills": without_kills, "share": rate / without_kills}
    return row | {"spent": spent, "kills": killed[1:]}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a table with each strategy's rates and median costs per kill."""
    cells = []
    for name, row in rows.items():
        kills = [kill for kill in row["kills"] if "next_step_s" in kill]
        costs = [[kill[part] for kill in kills] or [math.nan] for part in (*LOST, "next_step_s")]
        rates = [f"{row[rate]:.1f}" for rate in ("windows_per_s", "without_kills")]
        medians = [f"{statistics.median(values):.2f} s" for values in costs]
        cells.append([name, *rates, f"{row['share']:.0%}", str(len(row["kills"])), *medians])
    head = ["strategy", "windows/s", "without kills", "share", "kills"]
    return markdown_table([*head, *LOST.values(), "kill to next step"], cells)


def measure(folder: Path, flags: argparse.Namespace, rest: Sequence[str]) -> None:
    """Measure the goodput of each strategy, write goodput.json to the folder, and print the table.

    The table is for docs/evidence/failing-clusters.md. `rest`: flags of the trainer.
    """
    rows: dict[str, Any] = {}
    for name in flags.strategies:
        rows[name] = measured(name, folder, flags, rest)
        record = {"command": sys.argv, **machine(), "strategies": rows}
        (folder / "goodput.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    notes_path = Path(sys.argv.pop(1))
    start_rank(Notes(notes_path).train, command_line.parse)
