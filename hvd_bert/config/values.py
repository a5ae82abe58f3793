"""Values on a command line, as `Parser` checks them: numbers, names and paths, and the last of several values."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from hvd_bert.errors import UserError
from hvd_bert.storage.places import path_problem

LARGEST = 2**32 - 1  # the libraries that take these numbers accept no larger ones
MAX_SECONDS = 1e9  # the system's clocks overflow beyond 9e9
MAX_RUNS = 1000  # repeats of a measurement, which are planned one by one
GIVEN = "_given"  # no flag has this name


class StoreLast(argparse.Action):
    """Stores a flag's value, in place of an earlier one, and keeps all values under `given` for `Parser`'s warning."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        value = self.const if self.nargs == 0 else values
        vars(namespace).setdefault(GIVEN, {}).setdefault(self.dest, []).append(str(value))
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


def check_range(name: str, value: float | None, minimum: float, maximum: float) -> None:
    """Raise UserError unless a flag is missing or its value is in this range. NaN is in no range."""
    if value is None or minimum <= value <= maximum:
        return
    limit = f"at most {maximum:g}" if value > maximum else f"at least {minimum:g}"
    raise UserError(f"--{name} {value:g}: must be {limit}.")


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
