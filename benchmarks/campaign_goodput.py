"""Goodput: useful windows per second of a training whose ranks are killed, next to the same without kills.

As a program this file is a rank that `python benchmarks/campaign.py goodput` starts: NOTES FLAGS-OF-THE-TRAINER.
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
STRATEGIES = {"elastic": "horovod", "horovod": "horovod", "ddp": "ddp", "fsdp": "fsdp"}  # -> the trainer's
HOSTS = ("localhost", "127.0.0.1")  # names of this host, since Horovod elastic leaves the host of a lost rank
MAX_WHOLE_S = 30.0  # a training without kills
STEPS = 10**6  # more than a training takes
USEFUL, DETECTION, RESTART, REPEATED = PARTS = ("useful_s", "detection_s", "restart_s", "repeated_s")
LOST = {DETECTION: "detection", RESTART: "restart", REPEATED: "repeated steps"}


class Notes(Callback):
    """A file in which each rank notes its start and its failure, and rank 0 of each world its begin and its steps."""

    def __init__(self, path: Path) -> None:
        self._lines, self._writes = JsonLines(path), False
        self.add("started")

    def add(self, what: str, **values: Any) -> None:
        """Add a line, with the time by this host's monotonic clock."""
        self._lines.write({"time": time.monotonic(), "what": what, **values})

    def on_start(self, task: Task, world: World) -> None:
        self._writes = world.rank == 0
        if self._writes and task.plan:
            self.add("begin", windows=task.plan.num_windows)

    def on_step(self, step: int) -> None:
        if self._writes:
            self.add("step", step=step)

    def train(self, world: World) -> None:
        """A whole run on one rank."""
        try:
            api.run(None, world, [self])
        except Exception:
            self.add("noticed")  # most likely that another rank is lost
            raise


def read(path: Path) -> list[dict[str, Any]]:
    """The notes in the order of time, without a line that is being written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: note["time"])


def account(notes: Sequence[Mapping[str, Any]], global_batch: int, duration_s: float) -> list[dict[str, Any]]:
    """Sort the time from the first step's begin on into PARTS. Returns rows: before the first kill, and after each.

    The time of a step is useful if it is the first of its number; that of a step that a kill cut off is repeated. A
    kill is being detected until a rank or the launcher fails; a step that the others finish until then counts.

    `notes`: of the ranks, with "kill" and "ended" (the launcher). `windows` are those of the useful steps.
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
        elif what != "started" or now != USEFUL:  # else a rank that joins later
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
    """A training has lasted long enough, or does not start."""


@dataclass
class Training:
    """A command that trains on this host. `kills`: times in s, each with the place of the rank, from 0 to 1."""

    command: Sequence[str]
    log: Path
    notes: Path
    kills: list[tuple[float, float]]
    duration: float
    start_s: float = 300.0  # until the first step, at most

    def run(self) -> None:
        """Train for `duration` s from the first step on. Raises SystemExit if there was none."""
        self.end, self.begin = time.monotonic() + self.start_s, 0.0
        notes = Notes(self.notes)
        with self.log.open("w", encoding="utf-8") as log, suppress(Over):
            print(f"$ {shlex.join(self.command)}", file=log, flush=True)
            while True:  # whenever the launcher ends, as by a job script
                start_and_wait(self.command, os.environ, log, math.inf, lambda: self._watch(notes))
                notes.add("ended")
                if not self.begin or time.monotonic() > self.end:
                    break
        if not self.begin:
            raise SystemExit(f"{self.log}: {failure_in(self.log)}")

    def _watch(self, notes: Notes) -> None:
        """Every second: kill a rank if that is due within the next. Raises Over."""
        if not self.begin:
            self.begin = next((note["time"] for note in read(self.notes) if note["what"] == "begin"), 0.0)
            self.end = self.begin + self.duration if self.begin else self.end
        now = time.monotonic()
        if now > self.end:
            raise Over
        if self.begin and self.kills and self.begin + self.kills[0][0] < now + 1:
            time.sleep(max(0.0, self.begin + self.kills[0][0] - now))
            ranks = running_ranks()
            if ranks:  # else in a second
                notes.add("kill")
                ranks[int(self.kills.pop(0)[1] * len(ranks))].kill()


def running_ranks() -> list[psutil.Process]:
    """The ranks below this process, without the processes that these have started."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if RANK in process.cmdline()[:4]:  # a launcher names it later
                found[process] = process.ppid()
    return [process for process, parent in found.items() if parent not in {rank.pid for rank in found}]


def kill_times(every: float, duration: float) -> list[tuple[float, float]]:
    """The `kills` of a training, the same for all strategies: one in the middle half of each `every` s."""
    dice = random.Random(0)
    numbers = range(math.ceil(duration / every))
    kills = [(every * (number + dice.uniform(0.25, 0.75)), dice.random()) for number in numbers]
    return [kill for kill in kills if kill[0] < duration]


def launch(name: str, folder: Path, ranks: int, train: Sequence[str]) -> list[str]:
    """The command that trains by a strategy. `train`: the command of each rank."""
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
    """The record's row of a strategy: without kills, then with them."""
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
    """Rates, and the medians of what the kills cost."""
    cells = []
    for name, row in rows.items():
        kills = [kill for kill in row["kills"] if "next_step_s" in kill]
        parts = [[kill[part] for kill in kills] or [math.nan] for part in (*LOST, "next_step_s")]
        rates = [f"{row[rate]:.1f}" for rate in ("windows_per_s", "without_kills")]
        medians = [f"{statistics.median(part):.2f} s" for part in parts]
        cells.append([name, *rates, f"{row['share']:.0%}", str(len(row["kills"])), *medians])
    head = ["strategy", "windows/s", "without kills", "share", "kills"]
    return markdown_table([*head, *LOST.values(), "kill to next step"], cells)


def measure(folder: Path, flags: argparse.Namespace, rest: Sequence[str]) -> None:
    """Measure, print the table of docs/evidence/failing-clusters.md, and write goodput.json to the folder.

    `rest`: flags of the trainer.
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
