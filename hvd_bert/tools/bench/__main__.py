"""Measure the trainer's throughput, or run a sweep over strategies and numbers of ranks.

horovodrun -np 4 hvd-bert bench                                     speed.py, on the ranks of the launcher
hvd-bert bench sweep --strategies none,horovod,ddp --ranks 1,2,4    sweep.py, which starts the ranks itself
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_bert.config import command_line
from hvd_bert.config.parser import MAX_RUNS, Limits, Parser, add_number, name_or_path
from hvd_bert.config.settings import Config
from hvd_bert.errors import UserError
from hvd_bert.startup import collector_paused, start_rank
from hvd_bert.streams import end_when_lost
from hvd_bert.tools.runs.trainer_flags import names_data

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World


def main(world: World) -> None:
    """Run the measurement. Called by all ranks."""
    with world.raise_on_all_ranks():
        own, config = parse(sys.argv[1:])
    with collector_paused():
        from hvd_bert.tools.bench import speed
    speed.run(own, config, world)


# Flags that name weights or a tokenizer, which random windows do not need.
MODEL_FLAGS = {"model_name_or_path", "config_name", "tokenizer_name"}


def make_parser() -> Parser:
    """Make the parser of the benchmark's own flags."""
    parser = Parser(prog="hvd-bert bench", allow_abbrev=False)
    parser.description = (
        "Measure the training throughput. Also takes all flags of python -m hvd_bert.train. To compare strategies and"
        " numbers of ranks: hvd-bert bench sweep --help."
    )
    model = "Folder or config.json of an encoder, which gets new weights. (default: BERT-base)"
    parser.add_argument("--model", metavar="PATH", type=name_or_path, help=model)
    add_number(parser, "--steps", 10, "Optimizer steps per timed section.", Limits(minimum=2))
    add_number(parser, "--repeats", 3, "Number of timed sections.", Limits(minimum=1, maximum=MAX_RUNS))
    json = "Also write the figures to this JSON file. (default: none)"
    parser.add_argument("--json", type=Path, metavar="FILE", help=json)
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing --json FILE. (default: False)")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Parse the benchmark's own flags and the trainer's settings. Raises UserError.

    Adds two attributes to the flags. `random`: whether to train on random windows, because no data are named.
    `replaced`: names of the given flags that the benchmark overrides.
    """
    flags, rest = make_parser().parse_known_args(argv)
    given = command_line.flag_names(rest)
    flags.random = not names_data(rest)
    if not flags.random and flags.model:
        raise UserError("--model applies to random windows only. Omit it if you name the data.")
    if flags.random and given & MODEL_FLAGS:
        raise UserError(
            f"--{min(given & MODEL_FLAGS)} needs --train_file or --dataset_name. For random windows use --model."
        )
    total = flags.steps * (flags.repeats + 1)
    if "no_do_train" in given or "do_train" in given:
        raise UserError("--do_train: the benchmark always trains and does nothing else. Remove the flag.")
    ours = ["--no_do_eval", "--eval_strategy=no", "--save_steps=0", f"--max_steps={total}", "--fast_dev_run=False"]
    ours += [f"--logging_steps={flags.steps}", "--report_to=none"]
    flags.replaced = sorted(command_line.given_flags(rest) & command_line.given_flags(ours))
    shape = [f"--config_name={flags.model}"] if flags.model else []
    config = command_line.parse([*command_line.override_argv(rest, ours), *shape])
    config.train.refuse_auto("hvd-bert bench")
    return flags, config


if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        from hvd_bert.tools.bench import sweep

        end_when_lost()
        sys.exit(sweep.main(sys.argv[2:]))
    start_rank(main, lambda argv: parse(argv)[1])
