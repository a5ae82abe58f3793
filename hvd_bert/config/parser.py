"""The command-line parser of all commands: checked values, errors that are reported once, and a readable --help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from hvd_bert.config.values import Checked, name_or_path, path, shortened, whole_number
from hvd_bert.errors import UserError

HELP = {"-h", "--help"}


class Parser(argparse.ArgumentParser):
    """Checks numbers and paths while it parses them.

    Raises UserError for a wrong command line; argparse would print it on every rank and exit.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for action in (None, "store"):
            self.register("action", action, Checked)
        for kind, check in ((int, whole_number), (str, name_or_path), (Path, path)):
            self.register("type", kind, check)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shortened(message, 1000)}. `{self.prog} --help` lists the flags.")


def invocation(action: argparse.Action) -> str:
    """How a flag is written: without the spelling with hyphens, and without the optional value of a switch."""
    names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    return f"{', '.join(names)} {action.metavar or choices}".strip()


class HelpFormatter(argparse.HelpFormatter):
    """Lists each flag once, as `invocation` writes it."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return invocation(action)
