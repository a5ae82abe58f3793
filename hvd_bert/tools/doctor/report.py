"""The doctor's report: what each check found, its status, and how to fix it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from hvd_bert.tools.rendering import counted

OK, WARNING, FAILURE = "ok", "warning", "failure"
WIDTH = 118
_INDENT = " " * 22  # under the third column


@dataclass(frozen=True)
class CheckResult:
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


def ok(name: str, found: str, hint: str = "") -> CheckResult:
    """A check that passed."""
    return CheckResult(name, OK, found, hint)


def warning(name: str, found: str, hint: str = "") -> CheckResult:
    """A check that found something with which a training would start, but which may need attention."""
    return CheckResult(name, WARNING, found, hint)


def failure(name: str, found: str, hint: str = "") -> CheckResult:
    """A check that found something with which no training would start."""
    return CheckResult(name, FAILURE, found, hint)


def _filled(start: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=start, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
    )


def isolated(name: str, check: Callable[[], Iterable[CheckResult]]) -> list[CheckResult]:
    """The results of a check. An error in it becomes a failure, so that the next check still runs."""
    try:
        return list(check())
    except UserError as error:
        return [failure(name, str(error))]
    except Exception as error:
        return [failure(name, f"the check itself failed: {type(error).__name__}: {error}")]


def merged(by_host: Sequence[tuple[str, Sequence[CheckResult]]]) -> list[CheckResult]:
    """Merge the results of several hosts: equal ones appear once, others with their hosts."""
    hosts_by_result: dict[CheckResult, list[str]] = {}
    for host, results in by_host:
        for result in results:
            hosts_by_result.setdefault(result, []).append(host)
    names = list(dict.fromkeys(result.name for result in hosts_by_result))
    return [
        result if len(hosts) == len(by_host) else replace(result, hosts=tuple(hosts))
        for result, hosts in sorted(hosts_by_result.items(), key=lambda item: names.index(item[0].name))
    ]


@dataclass(frozen=True)
class HostReport:
    """What the doctor of a host prints with --json. Without `ranks` it found no world."""

    checks: tuple[CheckResult, ...]
    ranks: tuple[dict[str, Any], ...] = ()


class Report:
    """Prints sections as they are added or, with `as_json`, one object at the end. Only rank 0's is `shown`."""

    def __init__(self, as_json: bool, shown: bool) -> None:
        self.as_json = as_json
        self.shown = shown
        self.results: list[CheckResult] = []
        self.data: dict[str, Any] = {}

    def add(self, *results: CheckResult) -> None:
        """Add results to the report."""
        self.results += results
        if results:
            self.print_text("\n".join(map(str, results)))

    def print_text(self, text: str) -> None:
        """Print text, unless the output is JSON."""
        if not self.as_json:
            self._write(text)

    def _write(self, text: str) -> None:
        """In one write, because launchers tag every write."""
        if self.shown:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    @property
    def ready(self) -> bool:
        """Whether no check failed."""
        return all(result.status != FAILURE for result in self.results)

    def close(self, ready: str = "Ready: a training would start here", status: int = EXIT_BAD_INPUT) -> int:
        """Print the verdict: `ready`, or "Not ready". Returns the exit status, which is `status` if a check failed."""
        warnings = sum(result.status == WARNING for result in self.results)
        failed = list(dict.fromkeys(result.name for result in self.results if result.status == FAILURE))
        also = f" ({counted(warnings, 'warning')} above)" if warnings else ""
        word = ready.partition(":")[0].lower()
        self.print_text(f"\n{ready}{also}." if self.ready else f"\nNot {word}: {', '.join(failed)}.")
        if self.as_json:
            checks = [asdict(result) for result in self.results]
            self._write(json.dumps({"ready": self.ready, "checks": checks, **self.data}))
        return EXIT_OK if self.ready else status
