"""Convert a trained model to ONNX, for onnxruntime and other programs without Python's torch.

    hvd-bert export runs/mine --output model.onnx

One process. Exit status: 0 written and checked, 2 bad input, or a model that cannot be converted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_bert.config.parser import Parser
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.startup import collector_paused
from hvd_bert.streams import keep_running


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    try:
        flags = make_parser().parse_args(argv)
        with collector_paused():
            from hvd_bert.tools.export import conversion
        for line in conversion.convert(flags.model, flags.output):
            print(line)
    except UserError as error:
        print(f"hvd_bert: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_OK


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags."""
    parser = Parser(
        prog="hvd-bert export",
        description="Convert a trained model to ONNX, and compare its logits with those of transformers.",
    )
    parser.add_argument("model", metavar="MODEL_FOLDER", type=Path, help="Output folder of a training.")
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="The ONNX file to write. (required)")
    return parser


if __name__ == "__main__":
    keep_running()
    sys.exit(main())
