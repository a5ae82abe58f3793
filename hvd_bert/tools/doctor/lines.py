"""The doctor's report: the status and finding of each check, and how to fix problems."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK, UserError, visible
from hvd_bert.tools.rendering import counted

OK, WARNING, FAILURE = "ok", "warning", "failure"
WIDTH = 118
HEADLINES = ("World", "Allreduce")  # checks that a summary lists even if they pass


@dataclass(frozen=True)
class CheckResult:
    """The result of a check. `hint`: how to fix the problem. `hosts`: the hosts with this result; (): all hosts."""

    status: str
    name: str
    found: str
    hint: str = ""
    hosts: tuple[str, ...] = ()

    def text(self, lead: str = "  ") -> str:
        """Format the result for a terminal. `lead`: text before the status."""
        where = f"on {', '.join(self.hosts)}: " if self.hosts else ""
        start, indent = f"{lead}{self.status:<8} {self.name:<10} ", " " * (len(lead) + 20)
        text = _filled(start, indent, where + self.found)
        return f"{text}\n{_filled(indent, indent, '-> ' + self.hint)}" if self.hint else text


# Make a check's result. ok: it passed; warning: it may need attention; failure: a training would not start.
ok, warning, failure = (partial(CheckResult, status) for status in (OK, WARNING, FAILURE))


def _filled(start: str, indent: str, text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def isolated(name: str, check: Callable[[], Iterable[CheckResult]]) -> list[CheckResult]:
    """Run a check and return its results. An exception becomes a failure, so that the next check still runs."""
    try:
        return list(check())
    except Exception as error:
        reason = error if isinstance(error, UserError) else f"the check itself failed: {type(error).__name__}: {error}"
        return [failure(name, str(reason))]


def merged(by_host: Sequence[tuple[str, Sequence[CheckResult]]]) -> list[CheckResult]:
    """Merge the results of several hosts, and put results of the same check next to each other.

    Equal results appear once, with their hosts unless all hosts have them.
    """
    hosts_by_result: dict[CheckResult, list[str]] = {}
    for host, results in by_host:
        for result in results:
            hosts_by_result.setdefault(result, []).append(host)
    names = [result.name for result in hosts_by_result]
    return [
        replace(result, hosts=() if len(hosts) == len(by_host) else tuple(hosts))
        for result, hosts in sorted(hosts_by_result.items(), key=lambda item: names.index(item[0].name))
    ]


@dataclass
class Report:
    """Collects results and prints a summary or a JSON object at the end; with `verbose`, also each result at once.

    `shown`: whether this process prints; only rank 0 does. `starts`: description -> command that starts a training.
    `data`: additional fields of the JSON object.
    """

    as_json: bool
    shown: bool
    verbose: bool = True
    results: list[CheckResult] = field(default_factory=list)
    starts: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def add(self, *results: CheckResult) -> None:
        """Add results to the report."""
        self.results += results
        if results:
            self.print_details("\n".join(result.text() for result in results))

    def print_details(self, text: str) -> None:
        """Print text with --verbose, unless the output is JSON."""
        if self.verbose and not self.as_json:
            self._write(text)

    def _write(self, text: str) -> None:
        """Print text in a single write, because launchers tag every write."""
        if self.shown:
            sys.stdout.write((text if self.as_json else visible(text)) + "\n")
            sys.stdout.flush()

    @property
    def ready(self) -> bool:
        """Whether no check failed."""
        return all(result.status != FAILURE for result in self.results)

    def close(self, ready: str = "Ready: a training would start here", status: int = EXIT_BAD_INPUT) -> int:
        """Print the summary or JSON object. Returns the exit status: EXIT_OK if no check failed, else `status`.

        `ready`: first words of the summary if no check failed.
        """
        if self.as_json:
            checks = [asdict(result) for result in self.results]
            self._write(json.dumps({"ready": self.ready, "checks": checks, **self.data}))
        else:
            self._write("\n" * self.verbose + "\n\n".join([self._verdict(ready), *self._summary()]))
        return EXIT_OK if self.ready else status

    def _verdict(self, ready: str) -> str:
        warnings = sum(result.status == WARNING for result in self.results)
        failed = dict.fromkeys(result.name for result in self.results if result.status == FAILURE)
        counts = [counted(warnings, "warning") + " above" * self.verbose] if warnings else []
        counts += [] if self.verbose else [f"--verbose lists all {counted(len(self.results), 'check')}"]
        also = f" ({'; '.join(counts)})" if counts else ""
        verdict = ready if self.ready else f"Not {ready.partition(':')[0].lower()}: {', '.join(failed)}"
        return f"{verdict}{also}."

    def _summary(self) -> list[str]:
        """Return the summary's paragraphs: the problems, failures first, then how to start a training.

        Without start commands, the second paragraph has the results of HEADLINES. It is omitted if a check failed.
        --verbose has already printed all results, so only the start commands remain.
        """
        problems = sorted((r for r in self.results if r.status != OK), key=lambda result: result.status != FAILURE)
        listed = [result.text(f"  {number}. ") for number, result in enumerate(problems, 1)]
        ranks = [f"  {r.name}: {r.found}" for r in self.results if r.name in HEADLINES and r.status == OK]
        starts = [f"  {description}:\n    {command}" for description, command in self.starts.items()]
        paragraphs = [starts] if self.verbose else [listed, starts or ranks]
        return ["\n".join(lines) for lines in (paragraphs if self.ready else paragraphs[:-1]) if lines]
