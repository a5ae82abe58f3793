"""Search for a better learning rate, batch size, number of epochs or other training flags: `hvd-bert tune`.

    hvd-bert tune --ranks 4 --range learning_rate=2e-5:2e-4:log --range global_batch=32,64 --train_file train-v1.1.json

optuna chooses the settings (docs/guides/tuning.md). Prints the best settings or "Keep your settings", and writes a
page. Rerun the same command to resume. Exit status: 0 finished, 1 the run with the user's settings failed, 2 bad input,
75 stopped by a signal.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hvd_bert.config import command_line
from hvd_bert.config.parser import MAX_RUNS, MAX_SECONDS, Limits, Parser, add_number
from hvd_bert.config.settings import FLAGS
from hvd_bert.config.strategies import ALONE, STRATEGIES
from hvd_bert.errors import EXIT_FAILURE, EXIT_OK, UserError
from hvd_bert.streams import end_when_lost, keep_running
from hvd_bert.tools.rendering import counted
from hvd_bert.tools.runs.launching import Point, add_flags, choose
from hvd_bert.tools.runs.one_run import Watch, exit_status, train
from hvd_bert.tools.runs.out_folder import opened, replace
from hvd_bert.tools.runs.trainer_flags import PRESET, SET_BY_SWEEP, check_files, check_own, names_data, with_defaults

FILE = "tune.json"
RANGES = {
    "learning_rate": "1e-5:1e-4:log",
    "global_batch": "16,32,64",
    "num_train_epochs": "2,3,4",
    "warmup_ratio": "0:0.2",
}
# SET_BY_TUNE: flag that tuning sets for each run -> remedy. These are the flags that a sweep sets and the evaluation
# flags, except ACCEPTED.
ACCEPTED = {"num_train_epochs", "max_steps", "strategy", "per_device_eval_batch_size"}
EVALUATION = {name: "scores are compared" for name, flag in FLAGS.items() if flag.group == "evaluation"}
SET_BY_TUNE = {name: remedy for name, remedy in (SET_BY_SWEEP | EVALUATION).items() if name not in ACCEPTED}


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit status."""
    return exit_status(partial(_tune, argv))


def make_parser() -> Parser:
    """Make the parser of the command's own flags."""
    parser = Parser(prog="hvd-bert tune", allow_abbrev=False)
    parser.description = (
        "Search for the flags with the best score by trainings. All other flags go to python -m hvd_bert.train."
    )
    parser.add_argument(
        "--range",
        metavar="NAME[=VALUES]",
        action="append",
        default=[],
        help="Flag of the trainer to search, with LOW:HIGH, LOW:HIGH:log or A,B; may be repeated. (default:"
        f" {', '.join(f'{name}={values}' for name, values in RANGES.items())})",
    )
    add_number(parser, "--trials", 20, "Settings to try.", Limits(minimum=1, maximum=MAX_RUNS))
    parser.add_argument(
        "--pruner",
        choices=("median", "halving", "none"),
        default="median",
        help="optuna's rule that ends a trial early. (default: %(default)s)",
    )
    slots = "the slots of -H, the Slurm job's tasks, this host's GPUs, or 2"
    add_number(parser, "--ranks", None, f"Number of ranks. (default: {slots})", Limits(minimum=1))
    minutes = "Minutes after which no further trial starts. (default: none)"
    add_number(parser, "--minutes", None, minutes, Limits(minimum=0, maximum=MAX_SECONDS), metavar="M")
    add_flags(parser, "runs/tune")
    return parser


def _tune(argv: Sequence[str], check: Watch) -> int:
    flags, rest = make_parser().parse_known_args(argv)
    keep_running()
    if importlib.util.find_spec("optuna") is None:
        raise UserError("optuna is not installed. Run `pip install .[search]`.")
    from hvd_bert.tools.tune import search  # imports optuna and matplotlib

    launching = choose(flags)
    ranges = [text if "=" in text else f"{text}={RANGES.get(text, '')}" for text in flags.range or RANGES]
    check_own([*rest, *(f"--{text}" for text in ranges)], SET_BY_TUNE, "tuning")
    common = with_defaults(rest, launching.threads(os.environ), ("--save_steps=0",))
    common = command_line.override_argv(common, ["--eval_strategy=epoch"])
    config = command_line.parse(common)
    row = STRATEGIES[config.parallel.strategy]
    alone = row.world == ALONE and not row.several_gpus
    point = Point(config.parallel.strategy, flags.ranks or (1 if alone else launching.slots))
    if obstacle := launching.obstacle(point):
        raise UserError(f"{obstacle}.")
    check_files(config)
    parameters = [search.Parameter.of(text, common, config, point.ranks) for text in ranges]
    same = {"--range": flags.range, "--ranks": point.ranks, "-H": flags.H}
    same |= {"the trainer's flags": common, "--answer_language": config.data.answer_language, **launching.record()}
    content = {"same": same, "command": ["hvd-bert", "tune", *argv], **launching.machine.record()}

    def start(setting: Sequence[str], folder: Path, watch: Watch) -> str:
        environ, own = launching.environment(point, os.environ), [f"--output_dir={folder}", "--overwrite_output_dir"]
        command = launching.command(point, command_line.override_argv(common, [*setting, *own]), environ)
        return train(command, environ, folder, flags.timeout, watch, refuse=not setting)[0]

    with opened(flags.out / FILE, same, "tuning") as previous:
        replace(flags.out / FILE, content | {"result": previous.get("result")})
        print(f"{counted(point.ranks, 'rank')} under {launching.launcher(point)}, runs in {flags.out}")
        if not names_data(rest):
            remedy = "Tune with your own model, data and batch."
            print(f"warning: no data are named, so the preset `{PRESET}` is trained. {remedy}", file=sys.stderr)
        print(f"Without tuning: {' '.join(each.flag(each.now) for each in parameters)}", flush=True)
        try:
            trainings = search.Search(parameters, start, flags.out, check)
        except search.TrialFailed as error:
            print(f"hvd_bert: the run with your settings failed: {error}. Rerun to try again.", file=sys.stderr)
            return EXIT_FAILURE
        result = trainings.run(
            flags.trials, flags.minutes, flags.pruner, config.train.seed, answered=bool(previous.get("result"))
        )
        replace(flags.out / FILE, content | {"result": result})
    return EXIT_OK


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main(sys.argv[1:]))
