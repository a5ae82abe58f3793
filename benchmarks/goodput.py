"""Goodput: useful windows per second of a training whose ranks are killed, next to the same without kills.

    python benchmarks/goodput.py --every 60 --duration 600
    python benchmarks/goodput.py --strategies elastic,horovod --ranks 4 --save_steps 200

Further flags are those of python -m hvd_bert.train. The ranks run on this host. Whenever the launcher ends, the same
command is started again, as by a job script. Prints the table of docs/evidence/failing-clusters.md, and writes the
figures of each strategy and kill to --out, in goodput.json. Exit status 1 if a strategy failed.
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
from shared import launch_environment, machine, markdown_table

from hvd_bert.config import command_line
from hvd_bert.distributed.horovodrun import without_cache
from hvd_bert.output.callback import Callback
from hvd_bert.startup import start_rank
from hvd_bert.storage.writing import JsonLines
from hvd_bert.tools.bench.launching import program_path
from hvd_bert.tools.bench.one_run import failure_in, start_and_wait
from hvd_bert.tools.bench.points import with_defaults
from hvd_bert.training import api

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World
    from hvd_bert.tasks.base import Task

RANK = [str(Path(__file__).resolve()), "rank"]  # the program of a rank
STRATEGIES = {"elastic": "horovod", "horovod": "horovod", "ddp": "ddp", "fsdp": "fsdp"}  # -> the trainer's
HOSTS = ("localhost", "127.0.0.1")  # names of this host, since Horovod elastic leaves the host of a lost rank
WHOLE_S = 30.0  # of a training without kills, at most
STEPS = 10**6  # more than a training takes
USEFUL, DETECTION, RESTART, REPEATED = PARTS = ("useful_s", "detection_s", "restart_s", "repeated_s")
LOST = {DETECTION: "detection", RESTART: "restart", REPEATED: "repeated steps"}


class Notes(Callback):
    """A file in which each rank notes its start and its failure, and rank 0 of each world the begin and the steps."""

    def __init__(self, path: Path) -> None:
        self._lines, self._writes = JsonLines(path), False
        self.add("started")

    def add(self, what: str, **values: Any) -> None:
        """A line of the file, with the time by this host's clock that is never set."""
        self._lines.write({"time": time.monotonic(), "what": what, **values})

    def on_start(self, task: Task, world: World) -> None:
        self._writes = world.rank == 0
        if self._writes and task.plan:
            self.add("begin", ranks=world.size, windows=task.plan.num_windows)

    def on_step(self, step: int) -> None:
        if self._writes:
            self.add("step", step=step)

    def main(self, world: World) -> None:
        """A whole run on one rank."""
        try:
            api.run(None, world, [self])
        except Exception:
            self.add("noticed", rank=world.rank)  # most likely that another rank is lost
            raise


def read(path: Path) -> list[dict[str, Any]]:
    """The notes in the order of time, without a line that is being written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: note["time"])


class Account:
    """Sorts the time from the first step's begin on into PARTS, in all (`spent`) and after each kill (`kills`).

    The time of a step is useful if it is the first of its number; that of a step that a kill cut off is repeated. A
    kill is being detected until a rank or the launcher fails; a step that the others finish until then counts.
    """

    def __init__(self, notes: Sequence[Mapping[str, Any]], global_batch: int, duration_s: float) -> None:
        """`notes`: of the ranks, with "kill" and "ended" (the launcher); those after `duration_s` do not count."""
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.kills: list[dict[str, Any]] = []
        self.step = self.windows = 0  # the last step, and the windows up to it
        first = next(note for note in notes if note["what"] == "begin")
        self._epoch, self._global_batch = first["windows"], global_batch
        self.start = self.last_step = self._last = first["time"]
        self._now, self._cut_at = RESTART, 0.0
        for note in notes:
            if self.start <= note["time"] <= self.start + duration_s:
                getattr(self, f"_{note['what']}")(note["time"], note)
        self._fail(self.start + duration_s)

    def _spend(self, part: str, until: float) -> None:
        for sums in (self.spent, *self.kills[-1:]):
            sums[part] += until - self._last
        self._last = until

    def _fail(self, at: float) -> None:
        """End what is going on, at a failure or at the end."""
        if self._now == DETECTION:
            self._spend(REPEATED, self._cut_at)
        self._spend(self._now, at)

    def _begin(self, at: float, note: Mapping[str, Any]) -> None:
        self._started(at, note)
        self._spend(RESTART, at)
        self._now = USEFUL

    def _step(self, at: float, note: Mapping[str, Any]) -> None:
        again = note["step"] <= self.step
        self._spend(REPEATED if again else USEFUL, at)
        for step in range(self.step, note["step"]):
            done = step % math.ceil(self._epoch / self._global_batch) * self._global_batch
            self.windows += min(self._global_batch, self._epoch - done)
        self.step, self.last_step, self._cut_at = max(self.step, note["step"]), at, at
        if self.kills and self._now == USEFUL:
            self.kills[-1]["repeated_steps"] += again
            self.kills[-1].setdefault("next_step_s", at - self.start - self.kills[-1]["at_s"])

    def _kill(self, at: float, note: Mapping[str, Any]) -> None:
        if self._now != USEFUL:
            self._fail(at)
        self.kills.append({"at_s": at - self.start, "repeated_steps": 0, **dict.fromkeys(PARTS, 0.0)})
        self._now, self._cut_at = DETECTION, at

    def _started(self, at: float, note: Mapping[str, Any]) -> None:
        if self._now == DETECTION:
            self._noticed(at, note)

    def _noticed(self, at: float, note: Mapping[str, Any]) -> None:
        if self._now == DETECTION:
            self._fail(at)
        self._now = RESTART

    _ended = _noticed


class Over(Exception):
    """A training has lasted long enough, or shows no sign of life."""


@dataclass
class Training:
    """A command that trains on this host. `kills`: times in s, each with the place of the rank, from 0 to 1.

    `timeout`: seconds without a note after which the command is started again.
    """

    command: Sequence[str]
    log: Path
    path: Path  # of the notes
    kills: list[tuple[float, float]]
    duration: float
    timeout: float
    launches: int = 0

    def run(self) -> str:
        """Train for `duration` s from the first step's begin on. Returns "", or the reason why no step began."""
        notes, environ = Notes(self.path), {**os.environ, **launch_environment()}
        with self.log.open("w", encoding="utf-8") as log:
            print(f"$ {shlex.join(self.command)}", file=log, flush=True)
            while not self.launches or (self._start and time.monotonic() < self._start + self.duration):
                self.launches, self.launched = self.launches + 1, time.monotonic()
                with suppress(Over):
                    limit = self.duration + self.timeout
                    start_and_wait(self.command, environ, log, limit, lambda: self._watch(notes))
                notes.add("ended")
        return "" if self._start else failure_in(self.log)

    @property
    def _start(self) -> float | None:
        return first_begin(read(self.path))

    def _watch(self, notes: Notes) -> None:
        """Every second: kill a rank if that is due within the next. Raises Over."""
        found, now = read(self.path), time.monotonic()  # once: an hour's steps take a while
        start = first_begin(found)
        heard = max([self.launched, *(note["time"] for note in found if note["what"] != "kill")])
        if now > heard + self.timeout or (start and now > start + self.duration):
            raise Over
        if start and self.kills and start + self.kills[0][0] < now + 1:
            time.sleep(max(0.0, start + self.kills[0][0] - now))
            ranks, now = running_ranks(), time.monotonic()
            if ranks:  # else in a second
                ranks[int(self.kills.pop(0)[1] * len(ranks))].kill()
                notes.add("kill", time=now)


def first_begin(found: Sequence[Mapping[str, Any]]) -> float | None:
    """When the first step began; None if no step has."""
    return next((note["time"] for note in found if note["what"] == "begin"), None)


def running_ranks() -> list[psutil.Process]:
    """The ranks below this process, without the processes that these have started."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if RANK[0] in process.cmdline()[:4]:  # a launcher names it later
                found[process] = process.ppid()
    return [process for process, parent in found.items() if parent not in {rank.pid for rank in found}]


def kill_times(every: float, duration: float, seed: int) -> list[tuple[float, float]]:
    """The `kills` of a training: one in the middle half of each `every` s."""
    dice = random.Random(seed)
    numbers = range(math.ceil(duration / every))
    kills = [(every * (number + dice.uniform(0.25, 0.75)), dice.random()) for number in numbers]
    return [kill for kill in kills if kill[0] < duration]


def launch(name: str, flags: argparse.Namespace) -> list[str]:
    """The launcher's part of the command that trains by a strategy."""
    if name in ("ddp", "fsdp"):
        own = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        return [*own, f"--nproc-per-node={flags.ranks}", f"--max-restarts={STEPS}"]
    words = [program_path("horovodrun") or "horovodrun", "-np", str(flags.ranks), *without_cache()]
    if name == "elastic":
        script = flags.out / "hosts.sh"
        slots = zip(HOSTS, (math.ceil(flags.ranks / 2), flags.ranks // 2), strict=True)
        script.write_text("#!/bin/sh\n" + "".join(f"echo {host}:{number}\n" for host, number in slots))
        script.chmod(0o755)
        words += ["--min-np", "1", "--max-np", str(flags.ranks), "--network-interfaces", "lo"]
        words += ["--blacklist-cooldown-range", "1", "1", "--host-discovery-script", str(script)]
    return [*words, sys.executable]


def measure(name: str, flags: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """The record's row of a strategy: without kills, then with them."""
    accounts = []
    kills = kill_times(flags.every, flags.duration, flags.kill_seed)
    for label, times, duration in (("whole", [], min(flags.duration, WHOLE_S)), ("killed", kills, flags.duration)):
        folder, log, notes = (flags.out / f"{name}-{label}{suffix}" for suffix in ("", ".log", ".jsonl"))
        own = [f"--strategy={STRATEGIES[name]}", f"--elastic={name == 'elastic'}", f"--max_steps={STEPS}"]
        own += [f"--per_device_train_batch_size={flags.global_batch // flags.ranks}", f"--output_dir={folder}"]
        words = command_line.override_argv(with_defaults(["--save_steps=50", *rest], threads=1), own)
        training = Training(
            [*launch(name, flags), *RANK, str(notes), *words], log, notes, times, duration, flags.timeout
        )
        failure = training.run()
        if failure:
            return {"failed": f"{failure} ({log})"}
        accounts.append(Account(read(notes), flags.global_batch, duration))
    whole, killed = accounts
    rates = {"windows_per_s": killed.windows / flags.duration}
    rates["without_kills"] = whole.windows / (whole.last_step - whole.start or math.inf)
    share = rates["windows_per_s"] / (rates["without_kills"] or math.inf)
    return {"share": share, **rates, "launches": training.launches, "spent": killed.spent, "kills": killed.kills}


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


def main() -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--strategies", type=lambda text: text.split(","), default=list(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--global_batch", type=int, default=16, help="windows per step")
    parser.add_argument("--every", type=float, default=60.0, help="seconds per kill, in the middle half of each")
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds per strategy, from the first step on")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds without a sign of life")
    parser.add_argument("--kill_seed", type=int, default=0, help="of moments and ranks, the same for all strategies")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for all trainings")
    flags, rest = parser.parse_known_args()
    flags.out = flags.out.absolute()
    flags.out.mkdir(parents=True)
    rows = {name: measure(name, flags, rest) for name in flags.strategies}
    record = {"command": sys.argv, **machine(), "strategies": rows}
    (flags.out / "goodput.json").write_text(json.dumps(record, indent=1))
    for name, row in rows.items():
        print(f"{name}: {row['failed']}" if "failed" in row else f"{name}: {row['share']:.0%}")
    measured = {name: row for name, row in rows.items() if "share" in row}
    if measured:
        print(table(measured))
    return int(len(measured) < len(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == RANK[1:]:
        path = Path(sys.argv[2])
        del sys.argv[1:3]
        start_rank(Notes(path).main, command_line.parse)
    sys.exit(main())
