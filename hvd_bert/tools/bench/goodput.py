"""Goodput: useful windows per second of a training whose ranks are killed, next to the same without kills.

    hvd-bert bench goodput --every 60 --duration 600
    hvd-bert bench goodput --strategies elastic,horovod --ranks 4 --save_steps 200

The ranks run on this host. Whenever the launcher ends, the same command is started again, as by a job script.
Exit status: 0 all strategies are measured or cannot run here, 1 some failed, 2 bad input, 75 stopped by a signal.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hvd_bert.config.parser import LARGEST, MAX_SECONDS, Limits, Parser
from hvd_bert.distributed.slurm import IN_SWEEP
from hvd_bert.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, UserError, as_user_error
from hvd_bert.storage.reading import convert
from hvd_bert.storage.writing import writing_to
from hvd_bert.streams import keep_running
from hvd_bert.tools.bench import noted, record
from hvd_bert.tools.bench import points as planning
from hvd_bert.tools.bench.launching import TRAIN, Launching, Machine
from hvd_bert.tools.bench.noted import LOST, Account, Notes
from hvd_bert.tools.bench.one_run import Stopped, Watch, exit_status, failure_in, start_and_wait
from hvd_bert.tools.bench.points import Plan, Point
from hvd_bert.tools.rendering import percent, seconds
from hvd_bert.tools.rendering.page import Grid
from hvd_bert.tools.report.comparability import STRONG

FILE, FIGURE, SCRIPT = "goodput.json", "goodput.png", "hosts.sh"
RANK = "hvd_bert.tools.bench.noted"  # the module of a rank
ELASTIC = "elastic"
STRATEGIES = {ELASTIC: "horovod", "horovod": "horovod", "ddp": "ddp", "fsdp": "fsdp"}  # -> the trainer's
HOSTS = ("localhost", "127.0.0.1")  # names of this host, since Horovod elastic leaves the host of a lost rank
WHOLE_S = 30.0  # of a training without kills, at most
SHOWN = ("failed", "skipped", "windows_per_s", "share")  # of a row
STEPS = 10**6  # more than a training takes
SET_BY_GOODPUT = {
    **dict.fromkeys(("max_steps", "num_train_epochs"), "give --duration"),
    "per_device_train_batch_size": "give --global_batch",
    "elastic": "name elastic with --strategies",
}


class Over(Exception):
    """A training has lasted long enough, or shows no sign of life."""


@dataclass
class Training:
    """A command that trains on this host. `kills`: times in s, each with the place of the rank, from 0 to 1."""

    command: Sequence[str]
    log: Path
    path: Path  # of the notes
    kills: list[tuple[float, float]]
    duration: float
    timeout: float
    check: Watch  # raises Stopped after a signal
    launches: int = 0

    def run(self) -> str:
        """Train for `duration` s from the first step's begin on. Returns "", or the reason why no step began."""
        notes, environ = Notes(self.path), {**os.environ, IN_SWEEP: "1"}
        with self.log.open("w", encoding="utf-8") as log:
            print(f"$ {shlex.join(self.command)}", file=log, flush=True)
            while not self.launches or (self._start and time.monotonic() < self._start + self.duration):
                self.launches, self.launched, status = self.launches + 1, time.monotonic(), None
                limit = self.duration + self.timeout
                with suppress(Over):
                    status = start_and_wait(self.command, environ, log, limit, partial(self._watch, notes))
                if status == EXIT_STOPPED:
                    raise Stopped(f"a signal to {self.log}")
                notes.add("ended")
        return "" if self._start else failure_in(self.log)

    @property
    def _start(self) -> float | None:
        return first_begin(noted.read(self.path))

    def _watch(self, notes: Notes) -> None:
        """Every second: kill a rank if that is due within the next. Raises Over."""
        self.check()
        found, now = noted.read(self.path), time.monotonic()  # once: an hour's steps take a while
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


@dataclass(frozen=True)
class Spent:
    """The seconds of a training, or after one of its kills, by what they were spent on (`noted.Account`)."""

    useful_s: float
    detection_s: float
    restart_s: float
    repeated_s: float
    next_step_s: float = 0.0


@dataclass(frozen=True)
class Row:
    """A strategy in goodput.json that was measured."""

    share: float
    windows_per_s: float
    without_kills: float
    spent: Spent
    kills: list[Spent]


@dataclass(frozen=True)
class GoodputFile:
    """goodput.json, as far as it is read."""

    same: dict[str, Any]
    strategies: dict[str, dict[str, Any]]


def first_begin(found: Sequence[Mapping[str, Any]]) -> float | None:
    """When the first step began; None if no step has."""
    return next((note["time"] for note in found if note["what"] == "begin"), None)


def running_ranks() -> list[psutil.Process]:
    """The ranks below this process, without the processes that these have started."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if RANK in process.cmdline()[:4]:  # a launcher names it later
                found[process] = process.ppid()
    return [process for process, parent in found.items() if parent not in {rank.pid for rank in found}]


def kill_times(every: float, duration: float, seed: int) -> list[tuple[float, float]]:
    """The `kills` of a training: one in the middle half of each `every` s."""
    dice = random.Random(seed)
    numbers = range(math.ceil(duration / every))
    kills = [(every * (number + dice.uniform(0.25, 0.75)), dice.random()) for number in numbers]
    return [kill for kill in kills if kill[0] < duration]


@dataclass
class Goodput:
    """The strategies' trainings, one after the other."""

    flags: argparse.Namespace
    plan: Plan
    machine: Machine
    check: Watch

    def run(self, argv: Sequence[str]) -> int:
        """Measure what the record lacks, then print the table and draw the figure. Returns the exit status."""
        flags, out, rows = self.flags, self.flags.out, dict[str, dict[str, Any]]()
        config, refused = planning.check_flags(self.plan)
        points = {point.strategy: point for point in self.plan.points(config)}
        given = ("ranks", "global_batch", "every", "duration", "kill_seed")
        same = {f"--{name}": getattr(flags, name) for name in given} | self._launching("").record()
        same["the trainer's flags"] = self.plan.common_flags()
        now = {"command": ["hvd-bert", "bench", "goodput", *argv], **self.machine.record()}
        content = {"same": same, **now, "strategies": rows}

        def begin() -> None:
            previous = record.read_previous(out / FILE, GoodputFile, same, "measurement")
            rows.update(previous.get("strategies", {}))
            with as_user_error(lambda reason: f"{out / FILE} cannot be read ({reason}): {record.OTHER_OUT}"):
                for row in rows.values():
                    if "share" in row:
                        convert(row, Row)
            record.replace(out / FILE, content)  # by which the folder is recognized if this is interrupted

        with record.opened(out, FILE, begin), writing_to("--out", out):
            for name in flags.strategies:
                point = points[STRATEGIES[name]]
                obstacle = refused.get(point.strategy) or self._launching(name).obstacle(point)
                if "share" not in rows.get(name, {}):
                    passes = config.train.gradient_accumulation_steps
                    rows[name] = {"skipped": obstacle} if obstacle else self._measure(name, point, passes)
                    record.replace(out / FILE, content)
                print(f"{name}: {', '.join(f'{key} {rows[name][key]}' for key in SHOWN if key in rows[name])}")
            measured = {name: row for name, row in rows.items() if "share" in row}
            if measured:
                print(table(measured))
                (out / FIGURE).write_bytes(figure(measured))
        return EXIT_FAILURE if any("failed" in row for row in rows.values()) else EXIT_OK

    def _launching(self, name: str) -> Launching:
        ranks, words = self.flags.ranks, list[str]()
        if name == ELASTIC:
            words = ["--min-np", "1", "--max-np", str(ranks), "--network-interfaces", "lo"]
            words += ["--blacklist-cooldown-range", "1", "1", "--host-discovery-script", str(self.flags.out / SCRIPT)]
        elif name != "horovod":
            words = [f"--max-restarts={STEPS}"]
        return Launching("auto", tuple(words), None, self.machine)

    def _measure(self, name: str, point: Point, passes: int) -> dict[str, Any]:
        """The record's row of a strategy: without kills, then with them."""
        flags, out, accounts = self.flags, self.flags.out, list[Account]()
        hosts = zip(HOSTS, (math.ceil(flags.ranks / 2), flags.ranks // 2), strict=True)
        (out / SCRIPT).write_text("#!/bin/sh\n" + "".join(f"echo {host}:{slots}\n" for host, slots in hosts))
        (out / SCRIPT).chmod(0o755)
        kills = kill_times(flags.every, flags.duration, flags.kill_seed)
        for label, times, duration in (("whole", [], min(flags.duration, WHOLE_S)), ("killed", kills, flags.duration)):
            folder, log, notes = (out / f"{name}-{label}{suffix}" for suffix in ("", ".log", ".jsonl"))
            if folder.exists():  # of an earlier, interrupted command
                from hvd_bert.output import output_dir  # brings torch

                output_dir.clear(folder)
            notes.unlink(missing_ok=True)
            words = [*self.plan.trainer_flags(point, passes, folder), "--overwrite_output_dir=false"]
            words += [f"--elastic={name == ELASTIC}"]
            command = self._launching(name).command(point, [str(notes), *words])
            command = [RANK if word == TRAIN[-1] else word for word in command]
            training = Training(command, log, notes, times, duration, flags.timeout, self.check)
            failure = training.run()
            if failure:
                return {"failed": f"{failure} ({log})"}
            accounts.append(Account(noted.read(notes), flags.global_batch, duration))
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
        medians = [seconds(statistics.median(part)) for part in parts]
        cells.append([name, *rates, percent(row["share"]), str(len(row["kills"])), *medians])
    head = ["strategy", "windows/s", "without kills", "share", "kills"]
    return Grid([*head, *LOST.values(), "kill to next step"], cells).for_terminal()


def figure(rows: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A bar per strategy: the shares of its time."""
    import matplotlib
    from matplotlib.figure import Figure

    from hvd_bert.tools.report.plots import COLOURS, STYLE, png

    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(8, 1.4 + 0.5 * len(rows)), layout="constrained")
        axes, left = drawn.subplots(), [0.0] * len(rows)
        for number, (part, label) in enumerate({"useful_s": "useful steps", **LOST}.items()):
            shares = [100 * row["spent"][part] / sum(row["spent"].values()) for row in rows.values()]
            axes.barh(list(rows), shares, left=left, label=label, color=COLOURS[(3, 5, 2, 1)[number]])
            left = [start + share for start, share in zip(left, shares, strict=True)]
        axes.invert_yaxis()
        axes.set_xlabel("share of the time, %")
        drawn.legend(loc="outside upper center", ncols=4)
        return png(drawn)


def main(argv: Sequence[str]) -> int:
    """The command. Returns the exit status."""
    return exit_status(partial(_goodput, argv))


def _goodput(argv: Sequence[str], check: Watch) -> int:
    flags, rest = make_parser().parse_known_args(argv)
    for name in flags.strategies:
        if name not in STRATEGIES:
            raise UserError(f"--strategies {name}: unknown. Choose from: {', '.join(STRATEGIES)}.")
    planning.check_own(rest, SET_BY_GOODPUT, "goodput")
    keep_running()
    machine = replace(Machine.here(os.environ), allocation=None)
    plan = Plan(
        tuple(dict.fromkeys(STRATEGIES[name] for name in flags.strategies)),
        *((flags.ranks,), STRONG, 1, STEPS, flags.global_batch),
        threads=Launching("auto", (), None, machine).threads(os.environ),
        flags=("--save_steps=50", *rest),
    )
    return Goodput(flags, plan, machine, check).run(argv)


def make_parser() -> Parser:
    """The parser of this command's own flags."""
    parser = Parser(prog="hvd-bert bench goodput", allow_abbrev=False)
    parser.description = (
        "Kill random ranks of trainings on this host, and measure how many windows per second count. All other flags go"
        " to python -m hvd_bert.train. Without data it trains the preset `sweep`, with --save_steps 50."
    )
    add = parser.add_argument
    add(
        "--strategies", metavar="NAME,...", type=lambda text: text.split(","), default=list(STRATEGIES),
        help="elastic, horovod (started again), ddp and fsdp (`torchrun --max-restarts`). (default: all)",
    )  # fmt: skip
    add(
        "--ranks", metavar="N", type=int, default=2, limits=Limits(minimum=2),
        help="Number of ranks. (default: %(default)s)",
    )  # fmt: skip
    add(
        "--global_batch", metavar="N", type=int, default=16, limits=Limits(minimum=1),
        help="Windows per step. (default: %(default)s)",
    )  # fmt: skip
    for name, default, text in (
        ("every", 60.0, "Seconds per kill: one at a random moment in the middle half of each."),
        ("duration", 3600.0, "Seconds per strategy, from the first step on, after up to 30 s without kills."),
        ("timeout", 300.0, "Seconds without a sign of life after which a training is started again."),
    ):
        limits = Limits(minimum=1, maximum=MAX_SECONDS)
        add(f"--{name}", metavar="S", type=float, default=default, limits=limits, help=f"{text} (default: %(default)g)")
    add(
        "--kill_seed", metavar="N", type=int, default=0, limits=Limits(minimum=0, maximum=LARGEST),
        help="Seed of moments and ranks, the same for all strategies. (default: %(default)s)",
    )  # fmt: skip
    add(
        "--out", metavar="DIR", type=Path, default=Path("runs/goodput"),
        help="Folder for all trainings; the same folder resumes with the next strategy. (default: %(default)s)",
    )  # fmt: skip
    return parser
