"""Analyze a Horovod timeline: phases, messages, bandwidth, exposed communication, stragglers, advice.

    HOROVOD_TIMELINE=timeline.json horovodrun -np 2 python -m hvd_bert.train ...
    hvd-bert timeline timeline.json --html timeline.html

Runs in one process, without torch or a launcher. Also reads timelines of killed runs. Exit status: 0 done, 2 bad input.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds
    from hvd_bert.startup import start_command

    start_command()

import argparse
import sys
from pathlib import Path

from hvd_bert.config.parser import Limits, Parser
from hvd_bert.errors import EXIT_OK, visible
from hvd_bert.startup import run_command
from hvd_bert.storage.writing import check_output, write_output, writing_to
from hvd_bert.streams import end_when_lost
from hvd_bert.tools.timeline import summary
from hvd_bert.tools.timeline.findings import read


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status."""
    return run_command(lambda: _analyze(make_parser().parse_args(argv)))


def _analyze(flags: argparse.Namespace) -> int:
    if flags.html:
        with writing_to("--html", flags.html):
            check_output(flags.html, flags.overwrite, [flags.file])
    findings = read(flags.file, flags.ranks)
    if flags.html:
        write_output("--html", flags.html, summary.page(findings, definitions=True).as_html(), flags.overwrite)
    if flags.json:
        print(summary.as_json(findings))
    else:
        print(summary.page(findings).as_text())
        if flags.html:
            print(visible(f"\nHTML page: {flags.html}"))
    return EXIT_OK


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's flags."""
    parser = Parser(prog="hvd-bert timeline")
    parser.description = "Analyze a Horovod timeline: phases, bandwidth, exposed communication, stragglers, and advice."
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="Timeline written by --timeline_file or HOROVOD_TIMELINE."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of text. (default: False)")
    parser.add_argument(
        "--html", metavar="OUT", type=Path, help="Also write an HTML page to this file. (default: none)"
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing --html OUT. (default: False)")
    ranks = "Number of ranks, if the file does not name them. (default: from FILE)"
    parser.add_argument("--ranks", type=int, metavar="N", limits=Limits(minimum=1), help=ranks)
    return parser


if __name__ == "__main__":
    end_when_lost()
    sys.exit(main())
