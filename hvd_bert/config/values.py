"""Values on a command line, as `Parser` checks them: numbers, names and paths, and flags that are given twice."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from hvd_bert.storage.places import path_problem

LARGEST = 2**32 - 1  # the libraries that take these numbers accept no larger ones


class StoreOnce(argparse.Action):
    """Stores a flag's value, and refuses a second one that differs."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        value = self.const if self.nargs == 0 else values
        first = vars(namespace).setdefault("_given", {}).setdefault(self.dest, str(value))
        if first != str(value):
            both = f"as {shortened(first)} and as {shortened(str(value))}"
            raise argparse.ArgumentError(self, f"given twice, {both}; remove one")
        setattr(namespace, self.dest, value)


def whole_number(text: str) -> int:
    """Parse a number of reasonable size."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {shortened(repr(text))}") from None
    if abs(number) > LARGEST:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is out of range: the largest number is {LARGEST}")
    return number


def name_or_path(text: str) -> str:
    """A name or path that can be opened, written to UTF-8 files, and passed to libraries."""
    problem = path_problem(text)
    if problem:
        raise argparse.ArgumentTypeError(f"{shortened(ascii(text))} {problem}")
    return text


def path(text: str) -> Path:
    """`name_or_path` as a path."""
    return Path(name_or_path(text))


def passage(text: str) -> str:
    """Text of any length."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:  # without UTF-8 in the locale, Python does not decode it
        pass
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise argparse.ArgumentTypeError(f"{shortened(ascii(text))} is not UTF-8 text") from None


def shortened(text: str, maximum: int = 200) -> str:
    """The start of a text, as much as fits into a message."""
    return text if len(text) <= maximum else f"{text[:maximum]}... ({len(text)} characters)"
