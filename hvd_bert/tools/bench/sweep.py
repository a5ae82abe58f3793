"""A sweep: train with every strategy on every number of ranks, several times, each time in new processes.

    hvd-bert bench sweep --strategies none,horovod,ddp,fsdp,deepspeed --ranks 1,2,4 --repeats 5
    hvd-bert bench sweep --strategies none,horovod --ranks 1,2,4,8 -H a100-01:4,a100-02:4 --bf16 \\
        --train_file train-v1.1.json --model_name_or_path bert-base-uncased --global_batch 64 --steps 100
    sbatch scripts/scaling.slurm --strategies none,horovod,ddp --ranks 1,2,4

Each point is a run of `python -m hvd_bert.train` in its own folder under --out, with its output in run.log.
`hvd-bert report OUT` makes tables and plots of them. Rerun the same command to resume.
Exit status: 0 every point is done, 1 some failed or cannot run here, 2 bad input, 75 stopped by a signal.
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

from tqdm import tqdm

from hvd_bert.config.parser import LARGEST, MAX_RUNS, Limits, Parser, add_number, shortened
from hvd_bert.distributed import slurm
from hvd_bert.distributed.interfaces import SETTING
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_FAILURE, EXIT_OK, UserError
from hvd_bert.storage.writing import writing_to
from hvd_bert.streams import keep_running
from hvd_bert.tools.bench.points import SCALINGS, SweepPlan, check_flags, check_strategies
from hvd_bert.tools.bench.progress import DONE, FAILED, SKIPPED, STATES, WAITING, Result, SweepRecord
from hvd_bert.tools.rendering import counted, report_files, seconds
from hvd_bert.tools.runs import record
from hvd_bert.tools.runs.finding import SWEEP
from hvd_bert.tools.runs.launching import STRONG, Launching, Machine, Point, add_flags, choose
from hvd_bert.tools.runs.one_run import LOG, MODEL, Stopped, Watch, exit_status, train
from hvd_bert.tools.runs.out_folder import opened
from hvd_bert.tools.runs.trainer_flags import PRESET, names_data, with_defaults

EXPORTED = ("OMP_NUM_THREADS", SETTING)  # to other hosts: threads, and each host's network interface
FAILURES = 2  # in a row; then the setting's other repeats are not run


def main(argv: Sequence[str]) -> int:
    """The command. Returns the exit status."""
    return exit_status(partial(_sweep, argv))


def _sweep(argv: Sequence[str], check: Watch) -> int:
    flags, rest = make_parser().parse_known_args(argv)
    flags.overwrite = flags.overwrite or (flags.out / SWEEP).exists()  # a sweep that resumes replaces its own report
    if flags.report:
        with writing_to("--report", flags.report):
            report_files.check(flags.report, flags.overwrite)
    keep_running()
    launching = choose(flags, Machine.here(os.environ))
    plan = SweepPlan(
        strategies=check_strategies(flags.strategies),
        ranks=tuple(sorted(set(flags.ranks))),
        scaling=flags.scaling,
        repeats=flags.repeats,
        steps=flags.steps,
        global_batch=flags.global_batch,
        threads=launching.threads(os.environ),
        flags=tuple(rest),
        epochs=flags.epochs,
        seeds=tuple(dict.fromkeys(flags.seeds)),
    )
    return Sweep(plan, launching, flags, argv, check).run()


def make_parser() -> Parser:
    """The parser of the sweep's own flags."""
    parser = Parser(prog="hvd-bert bench sweep", allow_abbrev=False)
    parser.description = (
        "Train with every strategy on every number of ranks, and compare their throughput. All other flags go to"
        " python -m hvd_bert.train. A flag of one strategy, such as --zero_stage, goes to that strategy only. Without"
        " --train_file, --dataset_name or --config it trains the preset `sweep`: the sample's text and a BERT of 6"
        " layers with new weights."
    )
    parser.add_argument(
        "--strategies",
        metavar="NAME,...",
        type=lambda text: text.split(","),
        default=["none", "horovod"],
        help="Strategies to compare. (default: none,horovod)",
    )
    ranks = "Numbers of ranks. (default: 1,2)"
    parser.add_argument("--ranks", metavar="N,...", type=_numbers, default=[1, 2], help=ranks)
    number = parser.add_mutually_exclusive_group()
    add_number(number, "--repeats", 3, "Runs per point.", Limits(minimum=1, maximum=MAX_RUNS))
    number.add_argument(
        "--seeds",
        metavar="N,...",
        type=lambda text: _numbers(text, 0, "seeds"),
        default=[],
        help="In place of --repeats: one run per point and seed. (default: none)",
    )
    length = parser.add_mutually_exclusive_group()
    add_number(length, "--steps", 30, "Optimizer steps per run; the first is warm-up.", Limits(minimum=2))
    epochs = "In place of --steps: passes over the training windows per run. (default: none)"
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


def _numbers(text: str, minimum: int = 1, name: str = "numbers of ranks") -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and len(part) < 11 and minimum <= int(part) <= LARGEST for part in parts):
        raise argparse.ArgumentTypeError(f"'{shortened(text)}' is not a list of {name} such as 1,2,4")
    return [int(part) for part in parts]


class Sweep:
    """A plan, its launcher and folder, and its progress."""

    def __init__(
        self, plan: SweepPlan, launching: Launching, flags: argparse.Namespace, argv: Sequence[str], check: Watch
    ) -> None:
        """Check everything before the first run starts. Raises UserError."""
        self.plan, self.launching, self.flags, self.out, self.check = plan, launching, flags, flags.out, check
        self.config, self.refused = check_flags(plan)
        self.points = plan.points(self.config)
        now = {"command": ["hvd-bert", "bench", "sweep", *argv], **launching.machine.record()}
        self.record = SweepRecord(self.out, self._same(), now)
        self.failures: Counter[tuple[str, int, str]] = Counter()
        self.unit = "windows"  # what a step takes, known after the first run

    def _same(self) -> dict[str, object]:
        """The settings of all points that the figures depend on."""
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
        """Run all points, then write the report. Returns the exit status."""
        done = 0
        try:
            with opened(self.out, SWEEP, lambda: self.record.begin(self.points)):
                self._mark_done_and_skipped()
                done = len(self.record.with_state(DONE))
                self.record.write()
                self._announce()
                self._run_all()
        except Stopped as stopped:
            raise self._stopped(str(stopped), done) from None
        counts = ", ".join(f"{len(self.record.with_state(state))} {state}" for state in (DONE, SKIPPED, FAILED))
        print(f"In {self.out}: {counts}.")
        self._print_reasons(FAILED)
        skipped = len(self.record.with_state(SKIPPED))
        if skipped:
            print(f"Skipped {counted(skipped, 'point')} for the reasons above: the report has no figures for them.")
        status = EXIT_FAILURE if skipped or self.record.with_state(FAILED) else EXIT_OK
        if not self.record.with_state(DONE):
            return status
        by_hand = f"Tables and plots: hvd-bert report {self.out} --out {self.out / 'report'}"
        if not self.flags.report:
            print(by_hand)
            return status
        again = ["--overwrite"] if self.flags.overwrite else []
        report = [sys.executable, "-m", "hvd_bert", "report", str(self.out), "--out", str(self.flags.report), *again]
        sys.stdout.flush()
        if subprocess.run(report, check=False).returncode:
            print(by_hand)
            return EXIT_FAILURE  # the flags were right
        return status

    def _stopped(self, reason: str, done: int) -> Stopped:
        """Requeue the Slurm job. `done`: the points that were done at the start; a failed one is run again."""
        left, now = len(self.record.with_state(WAITING)), len(self.record.with_state(DONE))
        progress = f"{now} of {len(self.points)} points" if now > done else ""
        why_not: str | None = ""
        if "SIGINT" not in reason:  # Ctrl-C in a session inside of a batch job
            why_not = slurm.requeue(os.environ, self.flags.requeue, progress, partial(print, flush=True))
        stopped = Stopped(f"{reason}, {left} points left")
        stopped.then = "" if why_not is None else f"{why_not} {stopped.then}".strip()
        return stopped

    def _mark_done_and_skipped(self) -> None:
        """Find the points that are done, and those that cannot run here."""
        for point, result in self.record.results.items():
            run = record.read(self.out / point.name)
            if not run.comparable():
                result.state, result.windows_per_s = DONE, run.windows_per_s
            else:
                result.reason = self.refused.get(point.strategy) or self.launching.obstacle(point)
                result.state = SKIPPED if result.reason else WAITING

    def _announce(self) -> None:
        plan, record = self.plan, self.record
        waiting = record.with_state(WAITING)
        counts = ", ".join(f"{len(record.with_state(state))} {state}" for state in STATES if record.with_state(state))
        print(f"{counted(len(self.points), 'run')} of {plan.length} in {self.out}: {counts}")
        if not names_data(plan.flags):
            print(
                f"No --train_file, --dataset_name or --config given: training the preset `{PRESET}` (the"
                " sample's text, a BERT of 6 layers with new weights)"
            )
        print(f"Trainer flags: {shlex.join(with_defaults(plan.flags, plan.threads))}")
        self.launching.warn_of_shared_cores(list(waiting), self.config.parallel.num_threads or 1)
        self._print_reasons(SKIPPED)

    def _run_all(self) -> None:
        for number, (point, result) in enumerate(self.record.results.items(), start=1):
            if result.state != WAITING:
                continue
            if self.failures[point.setting] >= FAILURES:
                result.state, result.reason = FAILED, f"not run: the {FAILURES} repeats before it failed"
            else:
                self._run(point, result)
            self.record.write()
            outcome = (
                f"{result.windows_per_s:.1f} {self.unit}/s" if result.windows_per_s else f"failed: {result.reason}"
            )
            took = f", {seconds(result.seconds)}" if result.seconds else ""
            print(f"[{number}/{len(self.points)}] {point}: {outcome}{took}  ETA {self._eta()}", flush=True)

    def _eta(self) -> str:
        expected = [self.record.expected_s(point) for point in self.record.with_state(WAITING)]
        return "?" if None in expected else str(tqdm.format_interval(sum(filter(None, expected))))

    def _run(self, point: Point, result: Result) -> None:
        """Train a point in a new folder and fill in its result. Raises Stopped."""
        folder = self.out / point.name
        flags = self.plan.trainer_flags(point, self.config.train.gradient_accumulation_steps, folder)
        environ = self.launching.environment(point, os.environ)
        exported = [name for name in EXPORTED if name in environ]
        result.command = self.launching.command(point, flags, exported)
        trained = train(result.command, environ, folder, self.flags.timeout, self.check)
        result.seconds = trained.seconds
        if trained.status == EXIT_BAD_INPUT and point.strategy == "none" and not self.record.with_state(DONE):
            raise UserError(trained.reason)  # all points share the wrong setting
        if trained.run is None:
            late = f"took longer than --timeout {self.flags.timeout:g} s"
            how = late if trained.status is None else f"status {trained.status}"
            result.state, result.reason = FAILED, f"{trained.reason} ({how}; {folder / LOG})"
            self.failures[point.setting] += 1
            return
        result.state, result.windows_per_s = DONE, trained.run.windows_per_s
        self.unit = trained.run.unit
        self.failures[point.setting] = 0
        if point.repeat != self.points[0].repeat:  # one saved model per point is enough; weights are large
            with writing_to("--out", self.out):
                (folder / MODEL).unlink(missing_ok=True)

    def _print_reasons(self, state: str) -> None:
        """Print each reason once, with its points."""
        points: dict[str, list[str]] = {}
        for point, result in self.record.with_state(state).items():
            points.setdefault(result.reason, []).append(point.name)
        for reason, names in points.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(f"  {state}: {names[0]}{more}: {reason}")
