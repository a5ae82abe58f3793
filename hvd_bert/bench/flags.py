"""The flags of `python -m hvd_bert.bench`: its own, and all of the trainer's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_bert.config import command_line
from hvd_bert.config.settings import Config
from hvd_bert.errors import EXIT_OK, UserError
from hvd_bert.parsing import Parser

# Flags of the trainer that name data, so that its own windows and weights are taken; and those that name weights only.
DATA_FLAGS = {"train_file", "dataset_name", "config"}
MODEL_FLAGS = {"model_name_or_path", "config_name", "tokenizer_name"}


def parse(argv: list[str], show_help: bool) -> tuple[argparse.Namespace, Config]:
    """The benchmark's flags, and the trainer's. Raises UserError."""
    parser = Parser(prog="python -m hvd_bert.bench", add_help=False, allow_abbrev=False)
    parser.description = (
        "How fast training is here. All flags of python -m hvd_bert.train are taken as well. Strategies and numbers of"
        " ranks beside each other: python -m hvd_bert.bench sweep --help."
    )
    parser.add_argument("--model", help="a BERT's folder or config.json; the weights are new (default: BERT-base)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a section (default 10)")
    parser.add_argument("--repeats", type=int, default=3, help="sections that are timed (default 3)")
    parser.add_argument("--windows", type=int, help="random windows to choose from (default: as many as are trained)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON as well")
    if command_line.HELP & set(argv):
        if show_help:
            parser.print_help()
        sys.exit(EXIT_OK)
    flags, rest = parser.parse_known_args(argv)
    for name, least in (("steps", 2), ("repeats", 1), ("windows", 1)):
        value = getattr(flags, name)
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}.")
    given = command_line.names_of(rest)
    flags.random = not given & DATA_FLAGS
    if not flags.random and (flags.model or flags.windows):
        raise UserError("--model and --windows are for random windows: leave them out where data is named.")
    if flags.random and given & MODEL_FLAGS:
        raise UserError(
            f"--{min(given & MODEL_FLAGS)} needs --train_file or --dataset_name; for random windows: --model."
        )
    if "no_do_train" in given or "do_train" in given:
        raise UserError("--do_train: the benchmark trains, and does nothing else.")
    total = flags.steps * (flags.repeats + 1)
    ours = ["--no_do_eval", "--eval_strategy=no", "--save_steps=0", f"--max_steps={total}"]
    return flags, command_line.parse([*rest, *ours, f"--logging_steps={flags.steps}"])
