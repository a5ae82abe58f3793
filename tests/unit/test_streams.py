"""Lost standard streams: a reader that has ended, a full disk, and a pipe that is not read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO

import pytest

from hvd_bert.errors import EXIT_BROKEN_PIPE, EXIT_FAILURE

SENT = 3000  # lines of 100 bytes, more than a pipe's buffer of 64 KiB
PROGRAM = """
import sys
from hvd_bert import streams
streams.PATIENCE_S = {patience}
streams.{policy}()
for number in range({sent}):
    print(f"{{number:{width}}}"{flush})
print("done", file=sys.stderr)
"""
WARNING = "warning: standard output cannot be written ({}): the command continues without it.\n"


def run(
    policy: str, *, sent: int = SENT, width: int = 99, flush=False, unbuffered=False, patience: float = 60, **streams
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(policy=policy, sent=sent, width=width, flush=", flush=True" * flush, patience=patience)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    options["env"] = os.environ | {"PYTHONUNBUFFERED": "1" * unbuffered}
    return subprocess.run([sys.executable, "-c", program], text=True, timeout=60, **options)


@pytest.fixture
def opened() -> Iterator[Callable[[str], IO[str]]]:
    """Yield `open_one(how)`, which opens a stream that cannot be written: "full disk", "no reader" or "unread"."""
    with ExitStack() as stack:

        def open_one(how: str) -> IO[str]:
            if how == "full disk":
                return stack.enter_context(open("/dev/full", "w"))
            reader, writer = (stack.enter_context(open(end, mode)) for end, mode in zip(os.pipe(), "rw", strict=True))
            if how == "no reader":
                reader.close()
            return writer

        yield open_one


@pytest.mark.parametrize("unbuffered", [True, False])
def test_nothing_is_lost_while_somebody_reads(unbuffered):
    done = run("keep_running", sent=50, width=99999, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (0, "done\n")
    assert done.stdout == "".join(f"{number:99999}\n" for number in range(50))


@pytest.mark.parametrize(
    ("how", "reason", "size", "unbuffered"),
    [
        ("no reader", "Broken pipe", {}, True),
        ("full disk", "No space left on device", {}, False),
        ("unread", "it was not read for 0.2 s", {"patience": 0.2}, False),
        # A pipe with room for one page is reported as writable, but a longer write would block.
        ("unread", "it was not read for 0.2 s", {"patience": 0.2, "sent": 50, "width": 9999}, True),
    ],
)
def test_command_continues_with_one_warning(opened, how, reason, size, unbuffered):
    done = run("keep_running", stdout=opened(how), unbuffered=unbuffered, **size)
    assert (done.returncode, sorted(done.stderr.splitlines(keepends=True))) == (0, ["done\n", WARNING.format(reason)])


@pytest.mark.parametrize("flush", [True, False])
def test_command_that_only_prints_ends_quietly(opened, flush):
    done = run("end_when_lost", stdout=opened("no reader"), sent=1, flush=flush)
    assert done.returncode == EXIT_BROKEN_PIPE
    assert done.stderr == ("" if flush else "done\n")  # unflushed lines are written at exit


def test_command_that_only_prints_names_a_full_disk(opened):
    done = run("end_when_lost", stdout=opened("full disk"), flush=True)
    assert done.returncode == EXIT_FAILURE
    assert done.stderr == "hvd_bert: standard output cannot be written: No space left on device.\n"


def test_closed_streams_are_replaced():
    program = PROGRAM.format(policy="keep_running", sent=1, width=99, flush="", patience=60)
    program += "sys.exit(open('/dev/null').fileno())"
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, program])
    assert done.returncode > 2  # no file gets descriptor 0, 1 or 2
