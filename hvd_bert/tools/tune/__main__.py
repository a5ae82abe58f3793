"""Search for faster Horovod settings or a better learning rate, batch and length, by trainings on the ranks given.

    hvd-bert tune --ranks 4 --bf16 --train_file train-v1.1.json --model_name_or_path bert-base-uncased
    hvd-bert tune -H a100-01:2,a100-02:2 --launcher mpirun --minutes 60 --range cycle --range fusion --range fp16
    hvd-bert tune --space training --range learning_rate=2e-5:2e-4:log --range global_batch=32,64 --trials 30 ...

optuna chooses the settings (docs/guides/tuning.md). Prints those to use, or "Keep the defaults", and writes a page.
Rerun the same command to resume. Exit status: 0 answered, 1 a run with the defaults failed, 2 bad input, 75 stopped by
a signal.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import partial

from hvd_bert.config import command_line
from hvd_bert.config.parser import MAX_RUNS, MAX_SECONDS, Limits, Parser, add_number
from hvd_bert.distributed.horovodrun import host_slots
from hvd_bert.errors import EXIT_FAILURE, EXIT_OK, UserError
from hvd_bert.storage.writing import writing_to
from hvd_bert.streams import end_when_lost, keep_running
from hvd_bert.tools.runs import launching as launches
from hvd_bert.tools.runs.launching import WEAK, Launching, Machine, Point
from hvd_bert.tools.runs.one_run import Watch, exit_status
from hvd_bert.tools.runs.out_folder import opened, read_previous, replace
from hvd_bert.tools.runs.trainer_flags import PRESET, check_files, names_data

FILE = "tune.json"
STEPS, PAIRS, MINUTES = 50, 6, 60
NO_DATA = f"no data are named, so the preset `{PRESET}` is trained. Tune with your own model, data and batch."
REFUSED = ("HOROVOD_AUTOTUNE=", "HOROVOD_TIMELINE=")


def main(argv: Sequence[str]) -> int:
    """The command. Returns the exit status."""
    return exit_status(partial(_tune, argv))


def make_parser() -> Parser:
    """The parser of tuning's own flags."""
    parser = Parser(prog="hvd-bert tune", allow_abbrev=False)
    parser.description = (
        "Search by trainings for faster settings of Horovod, or for those of the training with the best score. All"
        " other flags go to python -m hvd_bert.train."
    )
    parser.add_argument(
        "--space",
        choices=("horovod", "training"),
        default="horovod",
        help="Settings to search: Horovod's or the training's. (default: %(default)s)",
    )
    parser.add_argument(
        "--range",
        metavar="NAME[=VALUES]",
        action="append",
        default=[],
        help="Setting to search in place of the space's, with LOW:HIGH, LOW:HIGH:log or A,B; may be repeated."
        " (default: all of the space but fp16)",
    )
    add_number(parser, "--trials", 20, "Settings to try.", Limits(minimum=1, maximum=MAX_RUNS))
    parser.add_argument(
        "--pruner",
        choices=("median", "halving", "none"),
        default="median",
        help="optuna's rule that ends a trial early. (default: %(default)s)",
    )
    room = "the slots of -H, the Slurm job's tasks, this host's GPUs, or 2"
    add_number(parser, "--ranks", None, f"Number of ranks. (default: {room})", Limits(minimum=1))
    steps = f"Optimizer steps per run; the first is warm-up. (default: {STEPS}; not for training)"
    add_number(parser, "--steps", None, steps, Limits(minimum=2))
    pairs = f"Pairs of runs in the final comparison. (default: {PAIRS}; not for training)"
    add_number(parser, "--pairs", None, pairs, Limits(minimum=1, maximum=MAX_RUNS))
    minutes = f"Time budget; settings not reached in it are skipped. (default: {MINUTES}; training: none)"
    add_number(parser, "--minutes", None, minutes, Limits(minimum=0, maximum=MAX_SECONDS), metavar="M")
    launches.add_flags(parser, "runs/tune")
    return parser


def _tune(argv: Sequence[str], check: Watch) -> int:
    flags, rest = make_parser().parse_known_args(argv)
    keep_running()
    _check_own_flags(flags)
    from hvd_bert.tools.tune import spaces, study, trials  # they bring optuna and matplotlib

    launching = launches.choose(flags, Machine.here(os.environ))
    texts = flags.range or [name for name in spaces.RANGES[flags.space] if name != "fp16"]  # which rounds the gradients
    forced = {"max_steps": str(flags.steps or STEPS)} if flags.space == spaces.HOROVOD else {}
    common = spaces.trainer_flags(flags.space, texts, rest, forced, launching.threads(os.environ))
    config = command_line.parse(common)
    point = Point(config.parallel.strategy, flags.ranks or _ranks(launching), WEAK, 1, 0)
    obstacle = launching.obstacle(point)
    if obstacle or (flags.space == spaces.HOROVOD and point.ranks < 2):
        raise UserError(f"{obstacle or '--ranks 1: a single rank sends nothing. Use 2 or more'}.")
    check_files(config)
    wanted = [spaces.make_parameter(text, flags.space, common, config, os.environ, point.ranks) for text in texts]
    environ = launching.environment(point, os.environ)
    users = {name: value for name, value in sorted(environ.items()) if name.startswith("HOROVOD_")}
    same = {"--space": flags.space, "--range": flags.range, "--ranks": point.ranks, "-H": flags.H}
    same |= {"the trainer's flags": common, **launching.record(), "HOROVOD_... in the environment": users}
    content = {"same": same, "command": ["hvd-bert", "tune", *argv], **launching.machine.record()}

    def begin() -> None:
        previous = read_previous(flags.out / FILE, same, "tuning")
        study.check(flags.out, previous.get("result"))
        replace(flags.out / FILE, content | {"result": previous.get("result")})

    with opened(flags.out, FILE, begin), writing_to("--out", flags.out):
        print(f"{point.ranks} ranks under {launching.launcher(point)}, runs in {flags.out}")
        if not names_data(rest):
            print(f"warning: {NO_DATA}", file=sys.stderr)
        launching.warn_of_shared_cores([point], config.parallel.num_threads or 1)
        print(f"Without tuning: {' '.join(each.word + spaces.as_text(each.now) for each in wanted)}", flush=True)
        runs = trials.Runs(launching, point, common, environ, flags.out, flags.timeout, check)
        budget = MINUTES if flags.space == spaces.HOROVOD else MAX_SECONDS
        minutes = budget if flags.minutes is None else flags.minutes
        try:
            speed = trials.Speed(runs, flags.pairs or PAIRS) if flags.space == spaces.HOROVOD else None
            objective = speed or trials.Score(runs, config.train.num_train_epochs)
            result = study.search(objective, wanted, flags.trials, minutes, flags.pruner, config.train.seed)
        except trials.RunFailed as error:
            print(f"hvd_bert: a run with the defaults failed: {error}. Rerun to try again.", file=sys.stderr)
            return EXIT_FAILURE
        replace(flags.out / FILE, content | {"result": result})
    return EXIT_OK


def _check_own_flags(flags: argparse.Namespace) -> None:
    """Raise UserError for what the search cannot take, before the imports."""
    for package in ("optuna", "scipy"):  # optuna's QMCSampler imports scipy
        if importlib.util.find_spec(package) is None:
            raise UserError(f"{package} is not installed. Run `pip install .[search]`.")
    for word in REFUSED if flags.space == "horovod" else ():
        if (value := os.environ.get(word.rstrip("="), "0")) != "0":
            raise UserError(f"{word}{value} in the environment changes what is measured. Unset it.")
    if flags.space == "training" and (flags.steps or flags.pairs):
        raise UserError("--steps and --pairs are for --space horovod. Leave them out.")


def _ranks(launching: Launching) -> int:
    """As many ranks as there is room for; 2 on a host without GPUs."""
    allocation = launching.machine.allocation
    if launching.hosts:
        return sum(host_slots(launching.hosts).values())
    if allocation and launching.choice in ("auto", "srun", "mpirun"):
        return allocation.nodes * allocation.tasks_per_node
    return launching.machine.gpus or 2


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main(sys.argv[1:]))
