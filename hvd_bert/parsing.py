"""Argument parsers whose errors are `UserError`s: argparse would print on every rank, and exit."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hvd_bert.errors import UserError


class Parser(argparse.ArgumentParser):
    """`prog`: the command as the user calls it. As a mix-in, name it before the other parser class."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. `{self.prog} --help` lists the flags.")
