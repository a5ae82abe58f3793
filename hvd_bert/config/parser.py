"""The command-line parser of all commands: checked values, errors that are reported once, and a readable --help."""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvd_bert.errors import UserError

HELP = {"-h", "--help"}
LARGEST = 2**32 - 1  # the largest number that all libraries accept
MAX_SECONDS = 1e9  # the system's clocks overflow beyond 9e9
AUTO = 0  # the number that stands for the word auto
MAX_RUNS = 1000  # repeats of a measurement


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The range of a number. None: no limit. `auto`: whether the word auto is accepted, too.
    `several`: whether several values are accepted, which become a tuple."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    auto: bool = False
    several: bool = False

    @property
    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        limits = [
            ("at least", operator.ge, self.minimum),
            ("above", operator.gt, self.above),
            ("at most", operator.le, self.maximum),
            ("below", operator.lt, self.below),
        ]
        return [(words, holds, limit) for words, holds, limit in limits if limit is not None]

    @property
    def range(self) -> str:
        """The range in words; "" if there is none."""
        return " and ".join(
            f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}" for words, _, limit in self._limits
        )

    @property
    def is_in_help(self) -> bool:
        """Whether --help shows the range: only if it excludes values that a user may give."""
        upper = self.maximum if self.below is None else self.below
        return (upper is not None and upper < MAX_SECONDS) or (self.minimum or 0) > 1

    def check(self, name: str, value: Any) -> None:
        """Raise UserError for a value out of the range. None is accepted, NaN never."""
        if self.auto and value == AUTO:
            return
        if value is not None and not all([value == value, *(holds(value, limit) for _, holds, limit in self._limits)]):
            raise UserError(f"--{name} {value}: must be {self.range or 'a number'}.")


class Checked(argparse.Action):
    """Stores a flag's value if it is within the flag's `limits` or the default."""

    def __init__(self, *args: Any, limits: Limits = Limits(), **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits = limits
        if limits.is_in_help:
            description, default, shown = str(self.help).partition(" (default: ")
            self.help = f"{description} {limits.range.capitalize()}.{default}{shown}"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        value = self.const if self.nargs == 0 else values
        if self.limits.several:
            value = tuple(values) if len(values) > 1 else values[0]
        for number in value if isinstance(value, list) else [value]:
            if number != self.default:
                self.limits.check(self.dest, number)
        setattr(namespace, self.dest, value)


def switch(text: str) -> bool:
    """Parse the value of a switch: run_qa's words, and YAML's on and off."""
    if text.lower() in ("yes", "true", "t", "y", "1", "on"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{shortened(repr(text))} is neither true nor false")


def whole_number(text: str) -> int:
    """Parse a number of reasonable size."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {shortened(repr(text))}") from None
    if abs(number) > LARGEST:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is out of range: the largest number is {LARGEST}")
    return number


def decimal(text: str) -> float:
    """Parse a number, also YAML's .inf."""
    try:
        return float(text.replace(".inf", "inf"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid float value: {shortened(repr(text))}") from None


def number_or_auto(text: str) -> int:
    """Parse a number from 1 or the word auto."""
    number = AUTO if text == "auto" else whole_number(text)
    if number == AUTO and text != "auto":
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1, or auto")
    return number


def path_problem(path: str) -> str:
    """The reason why no file can have this path, with a remedy; "" if there is none.

    Paths must be UTF-8 because libraries always encode them so.
    """
    if not path:
        return "is empty: give a value, or leave the flag out for its default"
    if path.encode(errors="replace").decode() != path:
        return "is not valid UTF-8: rename the file or folder"
    if "\0" in path:
        return "contains a NUL character: remove it"
    return ""


def name_or_path(text: str) -> str:
    """Parse a name or path that can be opened, written to UTF-8 files, and passed to libraries."""
    problem = path_problem(text)
    if problem:
        raise argparse.ArgumentTypeError(f"{shortened(ascii(text))} {problem}")
    return text


def path(text: str) -> Path:
    """Parse a path as `name_or_path` does."""
    return Path(name_or_path(text))


def shortened(text: str, maximum: int = 200) -> str:
    """The start of a text, short enough for a message."""
    return text if len(text) <= maximum else f"{text[:maximum]}... ({len(text)} characters)"


class Parser(argparse.ArgumentParser):
    """Checks numbers and paths while it parses them.

    Raises UserError for a wrong command line, in place of argparse's message and exit on every rank.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for action in (None, "store"):
            self.register("action", action, Checked)
        checks = {int: whole_number, float: decimal, str: name_or_path, None: name_or_path, Path: path}
        for kind, check in checks.items():
            self.register("type", kind, check)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{shortened(message, 1000)}. `{self.prog} --help` lists the flags.")


def add_number(
    parser: argparse._ActionsContainer, flag: str, default: float | None, text: str, limits: Limits, metavar: str = "N"
) -> None:
    """Add a flag that takes a number: a whole number if `metavar` is N, else a float.

    `text`: the help; "(default: ...)" is added if missing.
    """
    shown = text if "(default: " in text else f"{text} (default: %(default)s)"
    kind = int if metavar == "N" else float
    parser.add_argument(flag, metavar=metavar, type=kind, default=default, limits=limits, help=shown)


def invocation(action: argparse.Action) -> str:
    """A flag as --help shows it: without the spelling with hyphens, and without the optional value of a switch."""
    names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    return f"{', '.join(names)} {action.metavar or choices}".strip()


class HelpFormatter(argparse.HelpFormatter):
    """Lists each flag once, as `invocation` writes it. Preserves line breaks of descriptions."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return invocation(action)
