"""Answer questions with a trained model, or predict with a custom task.

    hvd-bert predict MODEL --context "Ada was born in London." --question "Where was Ada born?"
    hvd-bert predict MODEL --input dev-v1.1.json                   prints a few answers
    horovodrun -np 4 hvd-bert predict MODEL --input questions.csv --output answers.csv

With --output, all ranks of any launcher share the questions or rows. The file appears once it is complete.

Exit status: 0 predicted, 1 failure, 2 bad input; also if some rows cannot be answered, after the others are written.
"""

from __future__ import annotations

if __name__ == "__main__":  # runs before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from hvd_bert.config.command_line import add_flag, trained_settings
from hvd_bert.config.data import ANSWERING, QUESTION_ANSWERING
from hvd_bert.config.parser import HelpFormatter, Limits, Parser, add_number, name_or_path
from hvd_bert.config.settings import FLAGS
from hvd_bert.distributed.launch import Launcher, find_launcher
from hvd_bert.errors import UserError
from hvd_bert.startup import collector_paused, print_on_one_rank, run_command, take_local_rank
from hvd_bert.streams import end_when_lost

SWITCH = "version_2_with_negative"
OUTPUTS = (".jsonl", ".csv", ".parquet")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    print_on_one_rank(sys.argv[1:] if argv is None else argv)
    return run_command(partial(_predict, argv))


def _predict(argv: list[str] | None) -> None:
    launcher = find_launcher(os.environ)
    flags = parse_flags(argv, launcher)
    task = trained_settings(flags.model).get("task", QUESTION_ANSWERING)
    with collector_paused():
        from hvd_bert.distributed.runner import run_as_rank
        from hvd_bert.predict.answering import answer_file, run
        from hvd_bert.predict.rows import predict_file
    if not flags.output:
        run(flags)
        return
    # torch.distributed works with the ranks of any launcher. A single process needs no communication.
    flags.strategy = "none" if launcher.is_alone else "ddp"
    answers = task == QUESTION_ANSWERING
    run_as_rank(partial(answer_file, flags) if answers else partial(predict_file, flags, task), flags.strategy)


def parse_flags(argv: list[str] | None, launcher: Launcher) -> argparse.Namespace:
    flags = make_parser().parse_args(argv)
    if flags.input and (flags.question or flags.context):
        raise UserError("--input and --question or --context are both given: choose one source of questions.")
    if flags.output and not flags.input:
        raise UserError(f"--output {flags.output}: give the questions with --input.")
    if flags.output and flags.output.suffix not in OUTPUTS:
        raise UserError(f"--output {flags.output}: its name must end with {', '.join(OUTPUTS)}.")
    if not launcher.is_alone and not flags.output:
        raise UserError(
            f"{launcher.size or 'Several'} processes were started (by {launcher.name}), but only --input with --output"
            " uses them. Start the command without a launcher, or add these flags."
        )
    if not flags.input and not ((flags.question or "").strip() and flags.context):
        raise UserError("No question or no context is given. Give --question and --context, or --input FILE.")
    return flags


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's flags."""
    description = "Answer questions with a trained model, or predict."
    parser = Parser(prog="hvd-bert predict", description=description, formatter_class=HelpFormatter)
    parser.add_argument(
        "model", metavar="MODEL", type=name_or_path, help="Output folder of a training, a checkpoint, or a hub name."
    )
    parser.add_argument("--context", metavar="TEXT", type=str, help="Passage that contains the answer. (default: none)")
    parser.add_argument("--question", metavar="TEXT", type=str, help="Question about the passage. (default: none)")
    parser.add_argument(
        "--input",
        metavar="FILE",
        type=name_or_path,
        help="File of questions, or of rows for a custom task, in any format that the trainer reads. It needs no"
        " answers or labels. (default: none)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="Write the answers or predictions for all of --input: .jsonl, .csv or .parquet. (default: print a few"
        " answers)",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing --output FILE. (default: False)")
    replacing = "Replace columns of --input that have names of predictions. (default: False)"
    parser.add_argument("--overwrite_columns", action="store_true", help=replacing)
    add_number(parser, "--n_best", 0, "Candidates per answer in the file.", Limits(minimum=0))
    for name in ("question_column", "context_column", "answer_column"):
        add_flag(parser, name, None, f"as trained, else {FLAGS[name].default}")
    for name in ("cpu_kernels", "per_device_eval_batch_size"):
        add_flag(parser, name, FLAGS[name].default, FLAGS[name].shown_default)
    for name in (name for name in ANSWERING if name != SWITCH):
        add_flag(parser, name, None, "as trained, else at most 384" if name == "max_seq_length" else "as trained")
    # add_flag's switches accept a value, so they would consume MODEL if it comes next.
    parser.add_argument("--bf16", action="store_true", help="Compute in bf16 instead of fp32. (default: False)")
    parser.add_argument(
        f"--{SWITCH}", action="store_true", default=None, help="Allow 'no answer'. (default: as trained)"
    )
    return parser


if __name__ == "__main__":
    end_when_lost()
    take_local_rank()
    sys.exit(main())
