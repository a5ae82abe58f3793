"""A sweep: train with each strategy on each number of ranks, several times, each time in new processes.

    hvd-bert bench sweep --strategies none,horovod,ddp,fsdp,deepspeed --ranks 1,2,4 --repeats 5

Each point is a run of `python -m hvd_bert.train` in its own folder under --out, with its output in run.log.
`hvd-bert report OUT` makes tables and plots of them. Rerun the same command to resume.
Exit status: 0 all points are done, 1 some failed or cannot run here, 2 bad input, 75 stopped by a signal.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from hvd_bert.config.parser import LARGEST, MAX_RUNS, Limits, Parser, add_number, shortened
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.distributed import slurm
from hvd_bert.errors import EXIT_FAILURE, EXIT_OK
from hvd_bert.storage.writing import delete, writing_to
from hvd_bert.streams import keep_running
from hvd_bert.tools.bench.points import SCALINGS, PointState, SweepPlan, SweepPoint, check_flags
from hvd_bert.tools.rendering import counted, report_files, seconds
from hvd_bert.tools.runs import record
from hvd_bert.tools.runs.finding import SWEEP
from hvd_bert.tools.runs.launching import STRONG, Launching, add_flags, choose
from hvd_bert.tools.runs.one_run import MODEL, Stopped, Watch, exit_status, train
from hvd_bert.tools.runs.out_folder import opened, replace
from hvd_bert.tools.runs.trainer_flags import PRESET, names_data, with_defaults

FAILURES = 2  # after this number of failures in a row, a setting's remaining repeats are not run


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    return exit_status(partial(_sweep, argv))


def _sweep(argv: Sequence[str], check: Watch) -> int:
    plan = SweepPlan()
    _, plan.flags = make_parser().parse_known_args(argv, plan)
    plan.overwrite = plan.overwrite or (plan.out / SWEEP).exists()  # a sweep that resumes replaces its own report
    if plan.report:
        with writing_to("--report", plan.report):
            report_files.check(plan.report, plan.overwrite)
    keep_running()
    launching = choose(plan)
    plan.threads = launching.threads(os.environ)
    return Sweep(plan, launching, argv, check).run()


def make_parser() -> Parser:
    """Make the parser of the sweep's own flags."""
    parser = Parser(prog="hvd-bert bench sweep", allow_abbrev=False)
    parser.description = (
        "Train with each strategy on each number of ranks, and compare their throughput. All other flags go to"
        " python -m hvd_bert.train. A flag of one strategy, such as --zero_stage, goes to that strategy only. Without"
        " --train_file, --dataset_name or --config it trains the preset `sweep`: the sample's text and a BERT of 6"
        " layers with new weights."
    )
    strategies, ranks = "Strategies to compare. (default: none,horovod)", "Numbers of ranks. (default: 1,2)"
    parser.add_argument("--strategies", metavar="NAME,...", type=_strategies, default="none,horovod", help=strategies)
    parser.add_argument("--ranks", metavar="N,...", type=_numbers, default=[1, 2], help=ranks)
    number = parser.add_mutually_exclusive_group()
    add_number(number, "--repeats", 3, "Runs per point.", Limits(minimum=1, maximum=MAX_RUNS))
    seeds = "In place of --repeats: one run per point and seed. (default: none)"
    number.add_argument("--seeds", metavar="N,...", type=_seeds, default=[], help=seeds)
    length = parser.add_mutually_exclusive_group()
    add_number(length, "--steps", 30, "Optimizer steps per run; the first is warm-up.", Limits(minimum=2))
    epochs = "In place of --steps: epochs per run. (default: none)"
    add_number(length, "--epochs", None, epochs, Limits(above=0, maximum=1e9), metavar="X")
    parser.add_argument(
        "--scaling",
        choices=sorted(SCALINGS),
        default="strong",
        help="strong: the same --global_batch on all ranks; weak: the same --per_device_train_batch_size per rank."
        " (default: %(default)s)",
    )
    add_number(parser, "--global_batch", 16, "Windows per step, for strong scaling.", Limits(minimum=1))
    add_flags(parser, "runs/sweep")
    requeue = "After a stop by a signal, requeue the Slurm job, as in training. (default: %(default)s)"
    parser.add_argument("--requeue", choices=("auto", "no"), default="auto", help=requeue)
    report = "Also write the report to this folder. (default: none)"
    parser.add_argument("--report", metavar="DIR", type=Path, help=report)
    parser.add_argument("--overwrite", action="store_true", help="Replace a report in --report DIR. (default: False)")
    return parser


def _strategies(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in STRATEGIES:
            raise argparse.ArgumentTypeError(f"unknown strategy '{name}'. Choose from: {', '.join(STRATEGIES)}")
    return names


def _numbers(text: str) -> list[int]:
    return sorted(_seeds(text, 1, "numbers of ranks"))


def _seeds(text: str, minimum: int = 0, name: str = "seeds") -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) < 11 and minimum <= int(part) <= LARGEST for part in parts):
        raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not a list of {name} such as 1,2,4")
    return list(dict.fromkeys(map(int, parts)))


class Sweep:
    """A running sweep: the plan, the launcher, the folder, and the progress."""

    def __init__(self, plan: SweepPlan, launching: Launching, argv: Sequence[str], check: Watch) -> None:
        """Check the trainer's flags and list the points. Writes nothing. Raises UserError."""
        self.plan, self.launching, self.out, self.check = plan, launching, plan.out, check
        self.config, self.refused = check_flags(plan)
        self.points = plan.points(self.config)
        self.other_rows: list[dict[str, Any]] = []  # rows of points that only earlier commands had
        self.now = {"command": ["hvd-bert", "bench", "sweep", *argv], **launching.machine.record()}
        self.same = self._same()
        self.failures: Counter[tuple[str, int, str]] = Counter()
        self.unit = "windows"  # unit of a batch, known after the first run

    def _same(self) -> dict[str, object]:
        """Collect the settings that must stay the same when the sweep resumes."""
        plan, scalings = self.plan, SCALINGS[self.plan.scaling]
        return {
            "--steps": plan.steps if plan.epochs is None else None,
            "--epochs": plan.epochs,
            "--seeds": "set" if plan.seeds else None,
            **({"--global_batch": plan.global_batch} if STRONG in scalings else {}),
            "the trainer's flags": plan.common_flags(),
            # By strategy, so that a strategy with its own flags can be added later.
            **{f"the trainer's flags for {strategy} only": plan.own_flags(strategy) for strategy in plan.strategies},
            **self.launching.record(),
        }

    def run(self) -> int:
        """Run the remaining points, print a summary and, with --report, write the report. Returns the exit status.

        Raises Stopped.
        """
        done = 0
        try:
            with opened(self.out / SWEEP, self.same, "sweep") as previous:
                self._resume(previous)
                done = len(self._in_state("done"))
                self._write()
                self._announce()
                self._run_all()
        except Stopped as stopped:
            raise self._stopped(str(stopped), done) from None
        count = Counter(point.state for point in self.points)
        print(f"In {self.out}: {count['done']} done, {count['skipped']} skipped, {count['failed']} failed.")
        self._print_reasons("failed")
        if count["skipped"]:
            skipped = counted(count["skipped"], "point")
            print(f"Skipped {skipped} for the reasons above: the report has no figures for them.")
        status = EXIT_FAILURE if count["skipped"] or count["failed"] else EXIT_OK
        if count["done"] and not self._report():
            print(f"Tables and plots: hvd-bert report {self.out} --out {self.out / 'report'}")
            # The report may have failed with the status for bad input, but this command's flags are valid.
            return EXIT_FAILURE if self.plan.report else status
        return status

    def _report(self) -> bool:
        """Write the report if --report is given. Returns whether it was written."""
        if not self.plan.report:
            return False
        again = ["--overwrite"] if self.plan.overwrite else []
        report = [sys.executable, "-m", "hvd_bert", "report", str(self.out), "--out", str(self.plan.report), *again]
        sys.stdout.flush()
        return subprocess.run(report, check=False).returncode == EXIT_OK

    def _stopped(self, reason: str, done: int) -> Stopped:
        """Requeue the Slurm job, except after Ctrl-C. Returns an exception that describes the stop and how to resume.

        `done`: number of points that were done at the start.
        """
        remaining, now = len(self._in_state("waiting")), len(self._in_state("done"))
        progress = f"{now} of {len(self.points)} points" if now > done else ""
        why_not: str | None = ""
        if "SIGINT" not in reason:  # SIGINT is Ctrl-C in an interactive job
            why_not = slurm.requeue(os.environ, self.plan.requeue, progress, partial(print, flush=True))
        stopped = Stopped(f"{reason}, {remaining} points remaining")
        stopped.then = "" if why_not is None else f"{why_not} {stopped.then}".strip()
        return stopped

    def _resume(self, previous: dict[str, Any]) -> None:
        """Restore the results of an earlier start, and mark the points that are done or cannot run here.

        `previous`: content of sweep.json from the earlier start.

        The plan may have new strategies, ranks, repeats or kinds of scaling. Points that it lacks stay in sweep.json.
        """
        self.same = previous.get("same", {}) | self.same
        rows = {row["name"]: row for row in previous.get("points", [])}
        for point in self.points:
            row = rows.pop(point.name, {})
            point.seconds, point.command = row.get("seconds"), row.get("command", ())
            run = record.read(self.out / point.name)
            if not run.comparable():
                point.state, point.windows_per_s = "done", run.windows_per_s
            else:
                point.reason = self.refused.get(point.strategy) or self.launching.obstacle(point)
                point.state = "skipped" if point.reason else "waiting"
        self.other_rows = list(rows.values())

    def _write(self) -> None:
        rows = [{"name": point.name, **vars(point)} for point in self.points]
        replace(self.out / SWEEP, {"same": self.same, **self.now, "points": rows + self.other_rows})

    def _in_state(self, state: PointState) -> list[SweepPoint]:
        return [point for point in self.points if point.state == state]

    def _announce(self) -> None:
        plan, count = self.plan, Counter(point.state for point in self.points)
        counts = ", ".join(f"{count[state]} {state}" for state in ("done", "skipped", "waiting") if count[state])
        length = f"{plan.steps} steps" if plan.epochs is None else counted(plan.epochs, "epoch")
        print(f"{counted(len(self.points), 'run')} of {length} in {self.out}: {counts}")
        if not names_data(plan.flags):
            print(
                f"No --train_file, --dataset_name or --config given: training the preset `{PRESET}` (the"
                " sample's text, a BERT of 6 layers with new weights)"
            )
        print(f"Trainer flags: {shlex.join(with_defaults(plan.flags, plan.threads))}")
        self.launching.warn_of_shared_cores(self._in_state("waiting"), self.config.parallel.num_threads or 1)
        self._print_reasons("skipped")

    def _run_all(self) -> None:
        for number, point in enumerate(self.points, start=1):
            if point.state != "waiting":
                continue
            if self.failures[point.setting] >= FAILURES:
                point.state, point.reason = "failed", f"not run: the {FAILURES} repeats before it failed"
            else:
                self._run(point)
            self._write()
            outcome = f"{point.windows_per_s:.1f} {self.unit}/s" if point.windows_per_s else f"failed: {point.reason}"
            took = f", {seconds(point.seconds)}" if point.seconds else ""
            label = f"{point}, {point.scaling}, {'seed' if self.plan.seeds else 'repeat'} {point.repeat}"
            print(f"[{number}/{len(self.points)}] {label}: {outcome}{took}  ETA {self._eta()}", flush=True)

    def _eta(self) -> str:
        """Estimate the remaining time. A waiting point adds the mean time of its repeats so far, else of all runs."""
        ran = [(point.setting, point.seconds) for point in self.points if point.seconds is not None]
        if not ran:
            return "?"
        total = 0.0
        for point in self._in_state("waiting"):
            repeats = [took for setting, took in ran if setting == point.setting]
            total += fmean(repeats or [took for _, took in ran])
        return str(tqdm.format_interval(total))

    def _run(self, point: SweepPoint) -> None:
        """Train a point in its own folder, and store the result in the point. Raises Stopped.

        Deletes the model, which is large, after all repeats except the first.
        """
        folder, environ = self.out / point.name, self.launching.environment(point, os.environ)
        flags = self.plan.trainer_flags(point, self.config.train.gradient_accumulation_steps, folder)
        point.command = self.launching.command(point, flags, environ)
        # Until a run is done, bad input in a single process ends the sweep: all points would fail in the same way.
        first = point.strategy == "none" and not self._in_state("done")
        timeout = self.plan.timeout
        point.reason, point.seconds = train(point.command, environ, folder, timeout, self.check, refuse=first)
        if point.reason:
            point.state = "failed"
            self.failures[point.setting] += 1
            return
        run = record.read(folder)
        point.state, point.windows_per_s, self.unit = "done", run.windows_per_s, run.unit
        self.failures[point.setting] = 0
        if point.repeat != self.points[0].repeat:
            with writing_to("--out", self.out):
                delete(folder / MODEL)

    def _print_reasons(self, state: PointState) -> None:
        """Print each reason once, with the first point's name and the number of other points."""
        points: dict[str, list[str]] = {}
        for point in self._in_state(state):
            points.setdefault(point.reason, []).append(point.name)
        for reason, names in points.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(f"  {state}: {names[0]}{more}: {reason}")
