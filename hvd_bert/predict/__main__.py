"""Answer questions with a trained model.

    python -m hvd_bert.predict MODEL --context "Ada was born in London." --question "Where was Ada born?"
    python -m hvd_bert.predict MODEL --questions_file dev-v1.1.json --num_questions 3

One process. Exit status: 0 answered, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys

from hvd_bert.startup import collector_paused


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    flags = _parser().parse_args(argv)
    with collector_paused():
        from hvd_bert.predict import answering
    return answering.run(flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hvd_bert.predict", description="Answer questions with a model.")
    parser.add_argument("model", metavar="MODEL", help="the output_dir of a training, or a hub name")
    parser.add_argument("--context", help="the passage to read")
    parser.add_argument("--question", help="the question about it")
    parser.add_argument("--questions_file", help="questions in SQuAD's JSON, in place of --context and --question")
    parser.add_argument(
        "--num_questions", type=int, default=3, help="how many of the file's, evenly spread (default 3)"
    )
    parser.add_argument(
        "--max_seq_length", type=int, help="longest window in tokens (default: as trained, else up to 384)"
    )
    parser.add_argument(
        "--version_2_with_negative", action="store_true", help="'no answer' may be the answer (default: as trained)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
