"""Lines of the doctor's report: what was found, its status, and how to fix it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError

OK, WARNING, FAILURE = "ok", "warning", "failure"
WIDTH = 118
_INDENT = " " * 22  # under the third column


@dataclass(frozen=True)
class Line:
    """`status`: "ok", "warning" or "failure" (a training would not start). `hint`: how to fix it.

    `hosts`: where it was found, if not on all hosts.
    """

    name: str
    status: str
    found: str
    hint: str = ""
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"on {', '.join(self.hosts)}: " if self.hosts else ""
        text = _filled(f"  {self.status:<8} {self.name:<10} ", where + self.found)
        return f"{text}\n{_filled(_INDENT, '-> ' + self.hint)}" if self.hint else text


def _filled(start: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=start, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )


def isolated(name: str, check: Callable[[], Iterable[Line]]) -> list[Line]:
    """The lines of a check. An error in it becomes a failure line, so that the next check still runs."""
    try:
        return list(check())
    except UserError as error:
        return [Line(name, FAILURE, str(error))]
    except Exception as error:
        return [Line(name, FAILURE, f"the check itself failed: {type(error).__name__}: {error}")]


def merged(by_host: Sequence[tuple[str, Sequence[Line]]]) -> list[Line]:
    """Merge the lines of several hosts: equal lines appear once, others with their hosts."""
    hosts_of: dict[Line, list[str]] = {}
    for host, lines in by_host:
        for line in lines:
            hosts_of.setdefault(line, []).append(host)
    names = list(dict.fromkeys(line.name for line in hosts_of))
    return [
        line if len(hosts) == len(by_host) else replace(line, hosts=tuple(hosts))
        for name in names
        for line, hosts in hosts_of.items()
        if line.name == name
    ]


@dataclass(frozen=True)
class HostReport:
    """What the doctor of a host prints with --json. Without `ranks` it found no world."""

    checks: tuple[Line, ...]
    ranks: tuple[dict[str, Any], ...] = ()


class Report:
    """Prints sections as they are added or, with `as_json`, one object at the end. Only rank 0's is `shown`."""

    def __init__(self, as_json: bool, shown: bool) -> None:
        self.as_json = as_json
        self.shown = shown
        self.lines: list[Line] = []
        self.data: dict[str, Any] = {}

    def add(self, lines: Sequence[Line]) -> None:
        """Add lines to the report."""
        self.lines += lines
        if lines:
            self.print_text("\n".join(map(str, lines)))

    def print_text(self, text: str) -> None:
        """Print text, unless the output is JSON. In one write, because launchers tag every write."""
        if self.shown and not self.as_json:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    @property
    def ready(self) -> bool:
        """Whether no check failed."""
        return all(line.status != FAILURE for line in self.lines)

    def close(self, ready: str = "Ready: a training would start here", status: int = EXIT_BAD_INPUT) -> int:
        """Print the verdict: `ready`, or "Not ready". Returns the exit status, which is `status` if a check failed."""
        warnings = sum(line.status == WARNING for line in self.lines)
        failed = list(dict.fromkeys(line.name for line in self.lines if line.status == FAILURE))
        also = f" ({warnings} warning{'s' * (warnings > 1)} above)" if warnings else ""
        word = ready.partition(":")[0].lower()
        self.print_text(f"\n{ready}{also}." if self.ready else f"\nNot {word}: {', '.join(failed)}.")
        if self.shown and self.as_json:
            checks = [asdict(line) for line in self.lines]
            sys.stdout.write(json.dumps({"ready": self.ready, "checks": checks, **self.data}) + "\n")
            sys.stdout.flush()
        return EXIT_OK if self.ready else status
