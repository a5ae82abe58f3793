#!/usr/bin/env python3
"""Write docs/reference/flags.md from the parsers of all commands, and the first table of exit-status.md.

    python scripts/flags_page.py

Run this after a change to a flag or an exit status. `tests/unit/test_docs.py` checks that the page is current.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hvd_bert.config import command_line
from hvd_bert.config.parser import invocation
from hvd_bert.config.settings import FLAGS
from hvd_bert.errors import STATUSES
from hvd_bert.predict import __main__ as predict
from hvd_bert.tools.bench import __main__ as bench
from hvd_bert.tools.bench import sweep
from hvd_bert.tools.doctor import __main__ as doctor
from hvd_bert.tools.evaluate import __main__ as evaluate
from hvd_bert.tools.report import __main__ as report
from hvd_bert.tools.timeline import __main__ as timeline
from hvd_bert.tools.tune import __main__ as tune

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "flags.md"
EXIT_PAGE = PAGE.with_name("exit-status.md")
INTRODUCTION = """\
<!-- Written by `python scripts/flags_page.py`. Edit the flags' descriptions in the code, then rerun the script. -->

# Flags

`hvd-bert --help` prints the commands, and `COMMAND --help` the flags of a command. `train --help` prints the most used
flags, `train --help all` all, `train --help data` a group, `train --help seed` a flag.

## Training

`python -m hvd_bert.train`, or `hvd-bert train`

Flags of Hugging Face's run_qa keep their names ([differences](../guides/migrating.md#from-run_qa)). `--config` takes a
preset or a YAML file of flags; flags on the command line override it. Values in the file mean the same: YAML does not
convert `1:30`, `010` and `no`. A switch also takes a value: `--bf16 False`. If a flag is given twice, the last value
counts.

In paths, also in Python and in `HVD_BERT_CACHE`, `~` and variables such as `$HOME` are expanded. Addresses such as
`s3://` are refused.

Flags with † must keep their values when a run resumes. Some of the others have
[conditions](../guides/resume-and-reliability.md#settings-that-may-change-on-resume).
"""
OTHERS = {
    "Benchmark": bench,
    "Sweep": sweep,
    "Report": report,
    "Timeline": timeline,
    "Tuning": tune,
    "Preflight check": doctor,
    "Prediction": predict,
    "Evaluation": evaluate,
}
HELP_TEXT = re.compile(r"(?P<description>.*?)(?: \((?:default: (?P<default>.*)|(?P<required>required))\))?", re.DOTALL)


def page() -> str:
    """Return the whole page as Markdown."""
    blocks = [INTRODUCTION.rstrip(), *_tables(command_line.make_parser(), resume=True)]
    for title, command in OTHERS.items():
        parser = command.make_parser()
        blocks += [f"## {title}", f"`{parser.prog}`", _prose(str(parser.description)), *_tables(parser)]
    return "\n\n".join(blocks) + "\n"


def exit_page() -> str:
    """Return the page of exit statuses with an updated table."""
    rows = [["status", "meaning"], ["---", "---"], *([str(status), text] for status, text in STATUSES.items())]
    table = "\n".join(map(_line, rows))
    return re.sub(r"(?s)(?<=\A# Exit status\n\n).*?(?=\n\n)", lambda _: table, EXIT_PAGE.read_text(encoding="utf-8"))


def _tables(parser: argparse.ArgumentParser, resume: bool = False) -> Iterator[str]:
    """Yield a table of the flags without a group, then a heading and a table per group."""
    header = ["Flag", "Default", "Description"]
    head = [_line(header), _line(["---"] * len(header))]
    without_group: list[str] = []
    for number, group in enumerate(parser._action_groups):
        rows = [_row(action, resume) for action in group._group_actions if action.dest != "help"]
        if number < 2:  # argparse's own groups: positional arguments and options
            without_group += rows
        if number == 1:
            yield "\n".join([*head, *without_group])
        if number > 1:
            yield f"### {str(group.title).capitalize()}"
            if group.description:
                yield _prose(group.description)
            yield "\n".join([*head, *rows])


def _row(action: argparse.Action, resume: bool) -> str:
    match = HELP_TEXT.fullmatch(str(action.help) % vars(action))
    assert match
    default = match["default"] or match["required"] or ("not set" if action.option_strings else "required")
    if default in (str(action.default), f"{action.default:g}" if isinstance(action.default, float) else ""):
        default = f"`{default}`"
    fixed = resume and action.dest != "config" and not FLAGS[action.dest].may_change_on_resume
    return _line([f"`{invocation(action)}`{'†' * fixed}", _as_code(default), _as_code(match["description"])])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", " or ") for cell in cells) + " |"


def _prose(text: str) -> str:
    return textwrap.fill(_as_code(text), 120, break_long_words=False, break_on_hyphens=False)


def _as_code(text: str) -> str:
    """Put the flags and commands of a text in backticks."""
    spans = r"`[^`]*`|(?:python -m |hvd-bert )\w+(?:\.\w+)*(?: sweep)?(?: --help)?|--[a-z][a-z0-9_]*(?:=\S*[a-z0-9])?"
    return re.sub(spans, lambda match: match[0] if match[0].startswith("`") else f"`{match[0]}`", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    EXIT_PAGE.write_text(exit_page(), encoding="utf-8")
    print(PAGE, EXIT_PAGE)
