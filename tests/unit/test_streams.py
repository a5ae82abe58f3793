"""Lost standard streams: a reader that ended, a full disk, closed streams, a pipe that nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from hvd_bert.errors import EXIT_BROKEN_PIPE, EXIT_FAILURE

SENT = 3000  # lines of 100 bytes, more than a pipe's 64 KiB
PROGRAM = """
import sys
from hvd_bert import streams
streams.PATIENCE_S = 0.2
streams.{policy}()
for number in range({sent}):
    print(f"{{number:{width}}}"{flush})
print("done", file=sys.stderr)
"""
WARNING = "warning: standard output cannot be written ({}): the command continues without it.\n"


def run(
    policy: str, *, sent: int = SENT, width: int = 99, flush: bool = False, unbuffered: bool = False, **streams
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(policy=policy, sent=sent, width=width, flush=", flush=True" * flush)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    options["env"] = os.environ | {"PYTHONUNBUFFERED": "1" * unbuffered}
    return subprocess.run([sys.executable, "-c", program], text=True, timeout=60, **options)


def unread() -> tuple[int, int]:
    return os.pipe()


def without_reader() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.close(reader)
    return -1, writer


def full_disk() -> tuple[int, int]:
    return -1, os.open("/dev/full", os.O_WRONLY)


Opened = Callable[[], tuple[int, int]]


@pytest.fixture
def opened() -> Callable[[Opened], int]:
    descriptors = []

    def open_one(lost: Opened) -> int:
        descriptors.extend(lost())
        return descriptors[-1]

    yield open_one
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


@pytest.mark.parametrize("policy", ["keep_running", "end_when_lost"])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_nothing_is_lost_while_somebody_reads(policy, unbuffered):
    done = run(policy, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (0, "done\n")
    assert done.stdout == "".join(f"{number:99}\n" for number in range(SENT))


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    ("lost", "reason"),
    [(without_reader, "Broken pipe"), (full_disk, "No space left on device"), (unread, "it was not read for 0.2 s")],
)
def test_command_continues_with_one_warning(opened, lost, reason, unbuffered):
    done = run("keep_running", stdout=opened(lost), unbuffered=unbuffered)
    assert (done.returncode, sorted(done.stderr.splitlines(keepends=True))) == (0, ["done\n", WARNING.format(reason)])


@pytest.mark.parametrize("unbuffered", [False, True])
def test_long_lines_do_not_wait_for_a_reader(opened, unbuffered):
    """A pipe with space for a page is ready, but would keep a longer write waiting."""
    done = run("keep_running", sent=50, width=9999, stdout=opened(unread), unbuffered=unbuffered)
    assert (done.returncode, sorted(done.stderr.splitlines(keepends=True))) == (
        0,
        ["done\n", WARNING.format("it was not read for 0.2 s")],
    )


@pytest.mark.parametrize("unbuffered", [False, True])
def test_long_lines_are_whole(unbuffered):
    done = run("keep_running", sent=50, width=99999, unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (0, "done\n")
    assert done.stdout == "".join(f"{number:99999}\n" for number in range(50))


def test_closed_streams_are_replaced(tmp_path):
    program = PROGRAM.format(policy="keep_running", sent=1, width=99, flush="") + "sys.exit(open('/dev/null').fileno())"
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" >&-', sys.executable, program], capture_output=True, text=True)
    assert done.stderr == WARNING.format("it is closed") + "done\n"
    assert done.returncode > 2  # no file is opened as number 1
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, program])
    assert done.returncode > 2


def test_lost_standard_error_does_not_stop_a_command(opened):
    done = run("keep_running", stdout=opened(full_disk), stderr=subprocess.STDOUT)
    assert done.returncode == 0


@pytest.mark.parametrize(("sent", "flush"), [(SENT, True), (1, True), (1, False)])
def test_command_that_only_prints_ends_quietly(opened, sent, flush):
    done = run("end_when_lost", stdout=opened(without_reader), sent=sent, flush=flush)
    assert done.returncode == EXIT_BROKEN_PIPE
    assert done.stderr == ("" if flush else "done\n")  # the last lines are written at the interpreter's exit


def test_command_that_only_prints_names_a_full_disk(opened):
    done = run("end_when_lost", stdout=opened(full_disk), flush=True)
    assert done.returncode == EXIT_FAILURE
    assert done.stderr == "hvd_bert: standard output cannot be written: No space left on device.\n"
