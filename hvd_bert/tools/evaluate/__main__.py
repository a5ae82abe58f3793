"""Evaluate a trained model: scores, scores by kind of question, worst mistakes, comparison with another model.

Exit status: 0 evaluated, 1 failure, 2 bad input. The slow imports are in `running.py`, so that --help is fast.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_bert.config import command_line
from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.data import QUESTION_ANSWERING
from hvd_bert.config.flag import require
from hvd_bert.config.parser import HELP, Limits, Parser, add_number, name_or_path
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.errors import UserError
from hvd_bert.startup import collector_paused, start_rank

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World


def main(world: World) -> None:
    """Run the command. Called by all ranks."""
    with world.raise_on_all_ranks():
        own, configs = parse(sys.argv[1:])
        with collector_paused():
            from hvd_bert.tools.evaluate import running
    running.run(own, configs, world)


# Settings that default to their values in the model's training.
TRAINED = {name for name, flag in FLAGS.items() if flag.group in ("data", "question-answering")}
TRAINED -= {"train_file", "max_train_samples", "max_eval_samples"}
TRAINED |= {"per_device_eval_batch_size", "cpu_kernels"}
DATA = {"dataset_name", "dataset_config_name", "validation_file", "question_column", "context_column", "answer_column"}
DATA |= {"bad_examples"}
# Settings that are the same for both compared models.
SHARED = DATA | {"task", "version_2_with_negative", "answer_language"}
# Flags that the command accepts: for data, answers, model, output and computation.
ACCEPTED = TRAINED | {name for name, flag in FLAGS.items() if flag.group == "model"} - {"model_name_or_path"}
ACCEPTED |= {"max_eval_samples", "output_dir", "bf16", "fp16", "tf32", "deterministic", "cpu_kernels", "strategy"}
ACCEPTED |= {"num_threads"}


def make_parser() -> Parser:
    """Make the parser of the command's own flags."""
    parser = Parser(
        prog="hvd-bert evaluate",
        usage="%(prog)s [-h] MODEL [--validation_file FILE] [--compare MODEL] [--FLAG VALUE ...]",
        allow_abbrev=False,
    )
    parser.description = (
        "Evaluate a trained model on the ranks that the launcher starts, or compare two models. Also takes the flags of"
        " the trainer for the data (--validation_file, --dataset_name, ...), the answers and the ranks. By default they"
        " have the values of the model's training. --output_dir names a folder for all files."
    )
    parser.add_argument("model", metavar="MODEL", type=name_or_path, help="Output folder of a training, or a hub name.")
    compare = "Another model to compare with, question by question. (default: none)"
    parser.add_argument("--compare", metavar="MODEL", type=name_or_path, help=compare)
    add_number(parser, "--mistakes", 10, "Number of mistakes to show.", Limits(minimum=0))
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="Also write the results to this JSON file. (default: none)"
    )
    keep = "SQuAD 2.0: record the best F1's threshold for \"no answer\" as the model's. (default: False)"
    parser.add_argument("--keep_threshold", action="store_true", help=keep)
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing --json FILE. (default: False)")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[Config]]:
    """Parse the command's own flags, and the settings for evaluating each model. Raises UserError."""
    parser = make_parser()
    if not HELP & set(argv) and (not argv or argv[0].startswith("-")):
        raise UserError(f"Name the model first: {parser.prog} MODEL [--validation_file FILE].")
    own, words = parser.parse_known_args(argv)
    trained, given = trained_settings(own.model), command_line.given_flags(words)
    named = command_line.flag_names(words) & {"config", "dataset_name", "validation_file"}
    defaults, shared, accepted = TRAINED - DATA if named else TRAINED, SHARED, ACCEPTED
    config = _config(own.model, words, trained, defaults)
    if config.data.task != QUESTION_ANSWERING:  # such a task may need the training file, for example to build its model
        defaults, shared, accepted = (names | {"train_file"} for names in (defaults, shared, accepted))
        config = _config(own.model, words, trained, defaults)
    elif trained.get("train_file") and not trained.get("validation_file") and not named:
        raise UserError(f"The training of {own.model} records no validation data. Give --validation_file FILE.")
    if unfit := ", ".join(f"--{name}" for name in sorted(given - accepted)):
        raise UserError(f"These flags do not apply to an evaluation of {own.model}: {unfit}. Remove them.")
    if own.keep_threshold:
        require(not own.compare, "--keep_threshold works for one model only. Remove --compare.")
        require(config.data.version_2_with_negative, "--keep_threshold needs --version_2_with_negative.")
        problem = "has no train_config.yaml of a training"
        if trained:
            problem = "was trained without --version_2_with_negative, so no command would use the threshold by default"
        require(
            bool(trained.get("version_2_with_negative")),
            f"--keep_threshold: {own.model} {problem}. Give its threshold to each command by --version_2_with_negative"
            " --null_score_diff_threshold X.",
        )
    if not own.compare:
        return own, [config]
    settings = config.as_flat()
    same = {name: settings[name] for name in shared if settings[name] is not None}
    others = trained_settings(own.compare) | same
    return own, [config, _config(own.compare, words, others, TRAINED - DATA | same.keys())]


def _config(model: str, words: list[str], trained: Mapping[str, Any], names: Set[str]) -> Config:
    defaults = {name: trained[name] for name in names if name in trained}
    return command_line.parse([*words, f"--model_name_or_path={model}", "--no_do_train"], defaults)


if __name__ == "__main__":
    start_rank(main, lambda argv: parse(argv)[1][0])
