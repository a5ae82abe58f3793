"""The command-line parser of all commands: checked values, errors that are reported once, and a readable --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from hvd_bert.config.values import GIVEN, StoreLast, name_or_path, path, shortened, whole_number
from hvd_bert.errors import UserError
from hvd_bert.storage.places import check_working_directory
from hvd_bert.streams import say_once

OPTIMIZE = sys.flags.optimize
HELP = {"-h", "--help"}


class Parser(argparse.ArgumentParser):
    """Checks numbers and paths while it parses them. Warns if a flag has several values, of which the last one counts.

    Raises UserError for a wrong command line; argparse would print it on every rank and exit.
    """

    warns = True  # in this process: False if another rank prints the warnings

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for action in (None, "store"):
            self.register("action", action, StoreLast)
        for kind, check in ((int, whole_number), (str, name_or_path), (Path, path)):
            self.register("type", kind, check)

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """As argparse's. Raises UserError for a wrong command line, and if this process could not do its work."""
        check_working_directory()
        if OPTIMIZE > 1:
            raise UserError(
                "Python was started with -OO or PYTHONOPTIMIZE=2, which removes docstrings that transformers needs."
                " Unset PYTHONOPTIMIZE."
            )
        parsed, rest = super().parse_known_args(*args, **options)
        for name, values in parsed.__dict__.pop(GIVEN, {}).items():
            if self.warns and len(set(values)) > 1:
                all_values = shortened(", ".join(map(shortened, values)), 1000)
                # A command line is parsed before and after the ranks have joined.
                say_once(_warn, f"--{name} is given {len(values)} times ({all_values}): the last value counts.")
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shortened(message, 1000)}. `{self.prog} --help` lists the flags.")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def invocation(action: argparse.Action) -> str:
    """How a flag is written: without the spelling with hyphens, and without the optional value of a switch."""
    names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    return f"{', '.join(names)} {action.metavar or choices}".strip()


class HelpFormatter(argparse.HelpFormatter):
    """Lists each flag once, as `invocation` writes it."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return invocation(action)
