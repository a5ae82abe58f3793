"""Evaluate a trained model: scores, where it fails, and whether it is better than another model.

    hvd-bert evaluate MODEL --validation_file dev-v1.1.json                          one process
    horovodrun -np 4 -H localhost:4 hvd-bert evaluate MODEL --output_dir runs/scores    four ranks
    hvd-bert evaluate MODEL --compare OTHER                                          two models

Exit status: 0 evaluated, 1 failure, 2 bad input. `running.py` has the rest, so that --help does not wait for imports.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.config import command_line
from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.data import ANSWERING, TASKS
from hvd_bert.config.parser import HELP, Limits, Parser, add_number
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.errors import EXIT_OK, UserError
from hvd_bert.startup import collector_paused, start_rank

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World


def main(world: World) -> None:
    """The whole command on one rank. Called by all ranks."""
    with world.raise_on_all_ranks():
        own, configs = parse(sys.argv[1:])
        with collector_paused():
            from hvd_bert.tools.evaluate import running
    running.run(own, configs, world)


ACCEPTED = {name for name, flag in FLAGS.items() if flag.group in ("model", "data", "question-answering")}
ACCEPTED -= {"model_name_or_path", "train_file", "max_train_samples"}
ACCEPTED |= {"per_device_eval_batch_size", "bf16", "fp16", "tf32", "deterministic", "cpu_kernels"}
ACCEPTED |= {"strategy", "num_threads", "output_dir"}
OWN_TASKS = ("train_file",)  # a task of one's own may read its model's shape, or all its data, from it

# Settings that are taken from the model's training by default. Both models of a comparison have equal `SHARED` ones.
COLUMNS = ("question_column", "context_column", "answer_column")
DATA = ("dataset_name", "dataset_config_name", "validation_file", *COLUMNS, "bad_examples")
RULES = ("task", "version_2_with_negative")
SHARED = (*DATA, *RULES)
MODEL = (*RULES, *ANSWERING, "padding", "pad_to_max_length", "per_device_eval_batch_size")


def make_parser() -> Parser:
    """The parser of the command's own flags."""
    parser = Parser(
        prog="hvd-bert evaluate",
        usage="%(prog)s [-h] MODEL [--validation_file FILE] [--compare MODEL] [--FLAG VALUE ...]",
        allow_abbrev=False,
    )
    parser.description = (
        "Evaluate a trained model on the ranks that the launcher starts, or compare two. Also takes the trainer's flags"
        " for the data (--validation_file, --dataset_name, ...), the answers and the ranks. By default data and"
        " settings are those of the model's training. With --output_dir, that folder gets all files."
    )
    parser.add_argument("model", metavar="MODEL", type=str, help="Output folder of a training, or a hub name.")
    compare = "Another model to compare with, question by question. (default: none)"
    parser.add_argument("--compare", metavar="MODEL", type=str, help=compare)
    add_number(parser, "--mistakes", 10, "Number of mistakes to show.", Limits(minimum=0))
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="Also write the results to this JSON file. (default: none)"
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing --json FILE. (default: False)")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[Config]]:
    """The command's own flags, and the settings to evaluate each model with. Raises UserError."""
    parser = make_parser()
    if HELP & set(argv):
        parser.print_help()
        sys.exit(EXIT_OK)
    if not argv or argv[0].startswith("-"):
        raise UserError(f"Name the model first: {parser.prog} MODEL [--validation_file FILE].")
    own, words = parser.parse_known_args(argv)
    others = command_line.given_flags(words) - ACCEPTED
    named = command_line.flag_names(words) & {"config", "dataset_name", "validation_file"}
    trained = trained_settings(own.model)
    shared: tuple[str, ...] = SHARED
    names = MODEL if named else (*MODEL, *DATA)
    configs = [_config(own.model, words, trained, names)]
    if configs[0].data.task not in TASKS:
        others, shared = others.difference(OWN_TASKS), (*SHARED, *OWN_TASKS)
        configs = [_config(own.model, words, trained, (*names, *OWN_TASKS))]
    elif trained.get("train_file") and not trained.get("validation_file") and not named:
        raise UserError(f"The training of {own.model} records no validation data. Give --validation_file FILE.")
    if others:
        raise UserError(f"--{min(others)} does not concern an evaluation of {own.model}. Remove the flag.")
    if own.compare:
        settings = configs[0].as_flat()
        same = {name: settings[name] for name in shared if settings[name] is not None}
        configs.append(_config(own.compare, words, trained_settings(own.compare) | same, (*MODEL, *same)))
    return own, configs


def _config(model: str, words: list[str], trained: Mapping[str, Any], names: tuple[str, ...]) -> Config:
    defaults = {name: trained[name] for name in names if name in trained}
    return command_line.parse([*words, f"--model_name_or_path={model}", "--no_do_train"], defaults)


if __name__ == "__main__":
    start_rank(main, lambda argv: parse(argv)[1][0])
