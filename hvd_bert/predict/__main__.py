"""Answer questions with a trained model.

    python -m hvd_bert.predict MODEL --context "Ada was born in London." --question "Where was Ada born?"
    python -m hvd_bert.predict MODEL --questions_file dev-v1.1.json --num_questions 3

One process. Exit status: 0 answered, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys

from hvd_bert.config.parser import Parser
from hvd_bert.config.values import passage
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.startup import collector_paused, import_model_list
from hvd_bert.streams import end_when_lost


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        flags = make_parser().parse_args(argv)
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    with collector_paused():
        import_model_list()
        from hvd_bert.predict import answering
    return answering.run(flags)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = Parser(
        prog="python -m hvd_bert.predict", description="Answer questions about a passage with a trained model."
    )
    parser.add_argument("model", metavar="MODEL", type=str, help="Output folder of a training, or a hub name.")
    parser.add_argument(
        "--context", metavar="TEXT", type=passage, help="Passage that contains the answer. (default: none)"
    )
    parser.add_argument("--question", metavar="TEXT", type=passage, help="Question about the passage. (default: none)")
    parser.add_argument(
        "--questions_file",
        metavar="FILE",
        type=str,
        help="Questions in a data file, instead of --context and --question. It needs no answers. (default: none)",
    )
    for name, default in (("question", "question"), ("context", "context"), ("answer", "answers")):
        parser.add_argument(
            f"--{name}_column",
            metavar="NAME",
            type=str,
            default=default,
            help=f"Column of the {name}s, in files of flat rows. (default: %(default)s)",
        )
    parser.add_argument(
        "--num_questions",
        metavar="N",
        type=int,
        default=3,
        help="Number of the file's questions to answer, evenly spread. (default: %(default)s)",
    )
    parser.add_argument(
        "--max_seq_length",
        metavar="N",
        type=int,
        help="Maximum window length in tokens. (default: as trained, else at most 384)",
    )
    parser.add_argument(
        "--version_2_with_negative", action="store_true", help="Allow 'no answer'. (default: as trained)"
    )
    return parser


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main())
