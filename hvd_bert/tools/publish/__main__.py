"""Upload a trained model to the Hugging Face hub, or to another server that speaks its protocol (HF_ENDPOINT).

    hvd-bert publish runs/mine --repo_id me/mine --dry_run      show what would be uploaded
    hvd-bert publish runs/mine --repo_id me/mine --private

One process. Exit status: 0 uploaded, 1 the hub failed or is out of reach, 2 bad input or no permission.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_bert.config.parser import Parser
from hvd_bert.config.values import passage
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.startup import collector_paused
from hvd_bert.streams import keep_running


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        flags = make_parser().parse_args(argv)
        with collector_paused():
            from hvd_bert.tools.publish import upload
        return upload.run(flags)
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = Parser(
        prog="hvd-bert publish", description="Upload a trained model to the Hugging Face hub, in one commit."
    )
    parser.add_argument("model", metavar="MODEL_FOLDER", type=Path, help="Output folder of a finished training.")
    parser.add_argument(
        "--repo_id",
        metavar="USER/NAME",
        type=str,
        required=True,
        help="Repository on the hub. It is created if missing. (required)",
    )
    parser.add_argument(
        "--private", action="store_true", help="Create it as a private repository. An existing public one is refused."
    )
    parser.add_argument(
        "--revision", metavar="BRANCH", type=str, default="main",
        help="Branch to commit to. It is created if missing. (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--commit_message", metavar="TEXT", type=passage, default="Upload a model trained with hvd_bert",
        help="Message of the commit. (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--dry_run", action="store_true", help="Show what would be uploaded, without contacting the hub."
    )
    return parser


if __name__ == "__main__":
    keep_running()
    sys.exit(main())
