"""The command-line parser of all commands. It checks values, raises errors as UserError, and shortens --help."""

from __future__ import annotations

import argparse
import operator
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvd_bert.errors import UserError

HELP = {"-h", "--help"}
LARGEST = 2**32 - 1  # maximum of whole numbers; all libraries accept it as a seed
MAX_SECONDS = 1e9  # maximum of durations; the system's clocks overflow beyond 9e9
AUTO = 0  # the number that represents the word auto
MAX_RUNS = 1000  # maximum number of repetitions of a measurement
_SCHEMES = "abfss?|adl|az|dbfs|file|ftp|gcs|gs|hdfs|hf|https?|oss|r2|s3a?|sftp|ssh|wasbs?"
# URLs, also after pathlib has merged their slashes, HOST:/PATH, NAME=URL and Windows' drives and shares.
_ADDRESS = re.compile(rf"[^/]*:/|({_SCHEMES}):|([a-z]:|\\)\\", re.IGNORECASE)
_UNEXPANDED = re.compile(r"^~|\$[({A-Za-z_]|`")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The allowed values of a flag. A limit of None does not apply.

    `auto`: whether the word auto is accepted in addition. `several`: whether the flag takes several values, as a tuple.
    """

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
        """The range in words, such as "at least 1"; "" without limits."""
        return " and ".join(
            f"{words} {limit:g}" if isinstance(limit, float) else f"{words} {limit}" for words, _, limit in self._limits
        )

    @property
    def is_in_help(self) -> bool:
        """Whether --help shows the range: only if it excludes plausible values, unlike "at least 0"."""
        upper = self.maximum if self.below is None else self.below
        return (upper is not None and upper < MAX_SECONDS) or (self.minimum or 0) > 1

    def check(self, name: str, value: Any) -> None:
        """Raise UserError for a value out of the range. None is always accepted, NaN never. `name`: the flag."""
        if self.auto and value == AUTO:
            return
        if value is not None and not all([value == value, *(holds(value, limit) for _, holds, limit in self._limits)]):
            raise UserError(f"--{name} {value}: must be {self.range or 'a number'}.")


class Checked(argparse.Action):
    """argparse action that stores a flag's value if it is the default or within `limits`; else raises UserError."""

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
    """Parse the value of a switch: the words that run_qa accepts, or YAML's on and off."""
    if text.lower() in ("yes", "true", "t", "y", "1", "on"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"{shortened(repr(text))} is neither true nor false")


def whole_number(text: str) -> int:
    """Parse an integer from -LARGEST to LARGEST."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {shortened(repr(text))}") from None
    if abs(number) > LARGEST:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is out of range: the largest number is {LARGEST}")
    return number


def decimal(text: str) -> float:
    """Parse a float. Infinity may be written as in YAML (.inf)."""
    try:
        return float(text.replace(".inf", "inf"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid float value: {shortened(repr(text))}") from None


def number_or_auto(text: str) -> int:
    """Parse an integer other than 0, or the word auto, for which AUTO is returned."""
    number = AUTO if text == "auto" else whole_number(text)
    if number == AUTO and text != "auto":
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1, or auto")
    return number


def plain_text(text: str) -> str:
    """Parse a text. It must not be empty, and must be valid UTF-8, because libraries encode all texts as UTF-8."""
    problem = ""
    if not text:
        problem = "is empty: give a value, or leave the flag out for its default"
    elif text.encode(errors="replace").decode() != text:
        problem = "is not valid UTF-8: rename the file or folder"
    elif "\0" in text:
        problem = "contains a NUL character: remove it"
    if problem:
        raise argparse.ArgumentTypeError(f"{shortened(ascii(text))} {problem}")
    return text


def name_or_path(text: str) -> str:
    """Parse a local path or a hub name, as a shell does: expand ~ and variables. Does not test whether it exists."""
    path = plain_text(os.path.expanduser(os.path.expandvars(text)))
    problem = ""
    if _ADDRESS.match(path):
        problem = (
            "is an address, but only local files and folders can be used: download an input first, or copy an output"
            " after the run"
        )
    elif _UNEXPANDED.search(path) and not os.path.lexists(path):
        problem = (
            "has a variable, user or command that cannot be expanded: export the variable, or write the whole path"
        )
    if problem:
        raise argparse.ArgumentTypeError(f"{shortened(repr(text))} {problem}")
    return path


def checked_path(name: str, text: str) -> str:
    """Return a path as `name_or_path` does, for a path that is not a flag's. Raises UserError. `name`: its name."""
    try:
        return name_or_path(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{name} {error}.") from None


def shortened(text: str, maximum: int = 200) -> str:
    """Shorten a text for a message to its first `maximum` characters."""
    return text if len(text) <= maximum else f"{text[:maximum]}... ({len(text)} characters)"


class Parser(argparse.ArgumentParser):
    """Parser that checks numbers and paths, and raises UserError for a wrong command line.

    argparse itself would print its message on every rank, and exit.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for action in (None, "store"):
            self.register("action", action, Checked)
        checks = {int: whole_number, float: decimal, str: plain_text, None: plain_text}
        for kind, check in checks.items():
            self.register("type", kind, check)
        self.register("type", Path, lambda text: Path(name_or_path(text)))
        self._negative_number_matcher = re.compile(r"-[\d.]")  # argparse's own takes -1e-3 for a flag

    @property
    def advice(self) -> str:
        """The end of a message about a wrong command line."""
        return f" `{self.prog} --help` lists the flags."

    def error(self, message: str) -> NoReturn:
        flag = re.sub(r"^argument (--\w+)(/--[\w-]+)*:", r"\1:", message)  # one spelling is enough
        raise UserError(f"{shortened(flag, 1000)}.{self.advice}")


def add_number(
    parser: argparse._ActionsContainer, flag: str, default: float | None, text: str, limits: Limits, metavar: str = "N"
) -> None:
    """Add a flag that takes a number: an int if `metavar` is N, else a float.

    `text`: the flag's help; "(default: ...)" is appended unless it has that already.
    """
    shown = text if "(default: " in text else f"{text} (default: %(default)s)"
    kind = int if metavar == "N" else float
    parser.add_argument(flag, metavar=metavar, type=kind, default=default, limits=limits, help=shown)


def invocation(action: argparse.Action) -> str:
    """Format a flag for --help, without its spelling with hyphens and without the optional value of a switch."""
    names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
    return f"{', '.join(names)} {action.metavar or choices}".strip()


class HelpFormatter(argparse.HelpFormatter):
    """Help formatter that lists each flag once, as `invocation` formats it, and preserves descriptions' line breaks."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return invocation(action)
