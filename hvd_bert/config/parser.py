"""Command-line parsers: errors that are reported once, and a readable --help."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hvd_bert.config.values import CheckedParser, shortened
from hvd_bert.errors import UserError

HELP = {"-h", "--help"}


class Parser(CheckedParser):
    """Raises UserError for a wrong command line; argparse would print it on every rank and exit."""

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
