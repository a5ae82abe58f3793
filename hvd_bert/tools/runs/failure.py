"""Find the first failure in a run's log, which is the likely cause of the later failures."""

from __future__ import annotations

import io
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from hvd_bert.errors import EXIT_STOPPED
from hvd_bert.storage.reading import open_regular

MAX_LINE, MAX_LINES = 2**14, 100_000  # characters per line; last lines of an attempt that are searched
# Mark before a rank's line: of horovodrun or `mpirun --tag-output`, of `torchrun --tee`, or of torch's tracebacks.
_MARK = re.compile(r"\[(?:(?:\d+,)?\d+\]<std(?:out|err)>|(?:default|rank)\d+\]): ?")
# The first line of an attempt, written by the trainer or by Slurm. A requeued job appends its attempts to one log.
_BEGIN = re.compile(
    r"(?:\S+ \S+ INFO )?\d+ rank\(s\) on |slurmstepd.*: error: .* DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE)"
)
# Last lines of an attempt that Slurm ended. They follow Slurm's line, but do not belong to the next attempt.
_REQUEUED = re.compile(r"srun: error: .*: Terminated$|hvd_bert: Stopped .*, saved in [^ ]+\.$")
_NO_CAUSE = "Stopped (?:after step|by )|the launcher was killed"
_MESSAGE = re.compile(rf"^hvd_bert: (?!{_NO_CAUSE})(.*)", re.MULTILINE)
_FAILED = re.compile(r"(rank \d+ on \S+) failed:$")
_WAITED = re.compile(r"^(rank \d+ on \S+ has waited \d+ s for .*?)(?:\. Check the file systems.*)?$", re.MULTILINE)
_OTHERS = re.compile(rf"^(?:hvd_bert: )?((?:{_NO_CAUSE}|rank \d+ on \S+ lost another rank).*)", re.MULTILINE)
_EXCEPTION = re.compile(
    r"(?!RuntimeError: Horovod detected that one|torch\.distributed\.elastic)"  # raised by launchers, not by ranks
    r"[\w.]*(?:Error|Exception|Interrupt)(?::|$)"
)
_CHAINED = re.compile(r"During handling of the above|The above exception was the")
_ENDED = (  # launchers' reports of ended ranks
    r"^srun: error: (?P<host>[^:\n]+): tasks? (?P<ranks>[\d,-]+): (?P<how>.*)",
    r"noticed that process rank (?P<ranks>\d+) .* on node (?P<host>\S+) exited on (?P<how>.*)\.$",  # mpirun
    r"^ *Process name: .*?(?P<ranks>\d+)\]?\n *Exit code: *(?P<code>\d+)",  # mpirun, horovodrun --gloo
    r"^Process (?P<ranks>\d+) exit with status code (?P<code>\d+)",  # horovodrun --gloo
    r"(?P<root>^Root Cause .*\n.*\n.*\n)?^  host +: (?P<host>.*)\n  rank +: (?P<ranks>\d+) .*\n"  # torchrun
    r"  exitcode +: (?P<code>-?\d+)",
)
OTHER_TMPDIR = "Free some space in TMPDIR (/tmp if not set), or set another folder on each host: export TMPDIR=FOLDER."
_NO_SPACE = (  # Open MPI's and PMIx's reports that they cannot write their temporary files
    r"(?:\[(\S+?):\d+\] )?(PMIX[ _]ERROR: \S*OUT[-_]OF[-_]RESOURCE)",
    r"^A call to mkdir was unable to .*\n\n +(Directory: .*)\n +Error: +(.*)",
)
_TERMINATED = re.compile(r"Terminated|signal 15| 143$")  # launchers terminate the other ranks after a failure


def read_lines(path: Path) -> Iterator[str]:
    """Read the lines of a log; longer lines are split at MAX_LINE characters. Raises OSError."""
    with io.TextIOWrapper(open_regular(path), "utf-8", "replace") as file:
        yield from iter(partial(file.readline, MAX_LINE), "")


def split_mark(line: str) -> tuple[str, str]:
    """Split a line into its mark (_MARK) and text. mpirun marks each write, so a line may have several marks."""
    mark = _MARK.match(line)
    return (mark[0], line.replace(mark[0], "").rstrip()) if mark else ("", line.rstrip())


def first_failure(lines: Iterable[str], hosts: Sequence[str] = ()) -> str:
    """Find the first failure in the last attempt of a log. Returns one line; "" if there is no failure.

    `hosts`: the host of each rank, for launchers that do not name the hosts.
    """
    attempt: deque[tuple[str, str]] = deque(maxlen=MAX_LINES)
    requeued = False
    for mark, line in map(split_mark, lines):
        if _BEGIN.match(line):
            attempt.clear()
            requeued = " DUE TO " in line
        if not (requeued and _REQUEUED.match(line)):
            attempt.append((mark, line))
    text = "\n".join(line for _, line in attempt)
    exception, others = _exception(line for _, line in attempt), _OTHERS.findall(text)
    found = [*_MESSAGE.findall(text), *_raised(attempt), *_WAITED.findall(text)]
    no_space = [match for pattern in _NO_SPACE for match in re.finditer(pattern, text, re.MULTILINE)]
    found += [f"{': '.join(filter(None, match.groups()))}. {OTHER_TMPDIR}" for match in no_space]
    lost = [line.split()[1] for line in others if line.startswith("rank ")]
    found += [f"{place}: {exception or how}" for place, how in _ended(text, hosts, lost)]
    return next(filter(None, [*found, exception, *others]), "")


def _raised(attempt: Iterable[tuple[str, str]]) -> list[str]:
    """Find the first exception that a rank reports. Returns it with rank and host, as a list of at most one line."""
    lines = iter(attempt)
    for mark, line in lines:
        if failed := _FAILED.match(line):
            exception = _exception(text for other, text in lines if other == mark)
            return [f"{failed[1]}: {exception}"] if exception else []
    return []


def _exception(lines: Iterable[str]) -> str:
    """Find the exception of the first traceback; if exceptions are chained, the last of them. "" without exceptions."""
    found = ""
    for line in lines:
        if found and line.startswith("Traceback "):
            break
        if _CHAINED.match(line):
            found = ""
        elif not found and _EXCEPTION.match(line):
            found = line
    return found


def _ended(text: str, hosts: Sequence[str], lost: Collection[str]) -> list[tuple[str, str]]:
    """List pairs of a failed rank and how it ended. Ranks that lost another rank, or were terminated, come last.

    Ranks that a signal stopped (EXIT_STOPPED) are not listed.
    """
    host_of, ends = {str(rank): host for rank, host in enumerate(hosts)}, []
    for match in (match for pattern in _ENDED for match in re.finditer(pattern, text, re.MULTILINE)):
        end = match.groupdict("")
        ranks, host = end["ranks"], end.get("host") or host_of.get(end["ranks"])
        place = f"rank{'' if ranks.isdecimal() else 's'} {ranks}{f' on {host}' if host else ''}"
        how = end.get("how") or f"exit code {end['code']}".replace("exit code -", "signal ")
        order = (ranks in lost, bool(_TERMINATED.search(how)), not end.get("root"), match.start())
        if not how.endswith(f" {EXIT_STOPPED}"):
            ssh = " of ssh: killed by a signal, or the connection broke" if how == "exit code 255" else ""
            ends.append((order, place, how + ssh))
    return [(place, how) for _, place, how in sorted(ends)]
