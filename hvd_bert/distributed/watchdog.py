"""Ends the job if a rank stalls, and names that rank.

Horovod's stall inspector (0.28.1) reports nothing under Gloo: its list of ranks is empty (`reserve` instead of `resize`
in gloo_controller.cc). Under MPI it misses a frozen process, since its own thread waits for that rank, and a collective
that all ranks have started but that hangs. So each rank also has a `Watchdog` with the inspector's limit, which asks
which ranks wait and names the missing ones.
"""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from hvd_bert.distributed import logs
from hvd_bert.errors import EXIT_FAILURE

DISABLED = "HOROVOD_STALL_CHECK_DISABLE"
WARNS_AFTER = "HOROVOD_STALL_CHECK_TIME_SECONDS"
ENDS_AFTER = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
WARN_S, END_S = 120, 600  # for a step's collectives; longer than one rank takes to compile a model
LONGEST_S = 2 * 3600.0  # while one rank downloads, tokenizes, evaluates or writes
TURN_S = 6.0  # between two ranks' reports: a launcher ends the second rank within 5 s of the first one's end
ANSWER_S = 10.0  # a store behind a dead link does not answer
LISTED = "the tensors that Horovod lists above"


def inspect(environ: MutableMapping[str, str], elastic: bool) -> float:
    """Have the inspector end stalls. Keeps limits that the user has set. Call before `hvd.init`.

    Returns the seconds after which a step's collective counts as stalled; infinite for never.
    """
    if elastic:  # the next world would wait for the stalled rank, too: only warn
        environ.setdefault(WARNS_AFTER, str(END_S))
        return math.inf
    end = _seconds(environ.get(ENDS_AFTER, "0"))
    fitting = max(1, min(WARN_S, end // 5)) if end else WARN_S
    warn = _seconds(environ.setdefault(WARNS_AFTER, str(fitting)))
    end = _seconds(environ.setdefault(ENDS_AFTER, str(max(END_S, 5 * warn))))
    disabled = _seconds(environ.get(DISABLED, "0")) > 0
    return math.inf if disabled or end == 0 or end < warn else end  # Horovod ignores an end before the warning


def _seconds(text: str) -> int:
    """Parse as Horovod does."""
    number = re.match(r"\s*\+?(\d+)", text)
    return int(number[1]) if number else 0


class Arrivals:
    """Which ranks wait, through a key-value store that rank 0 serves. All ranks number their waits alike."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """`store`: torch's; None: any other rank may be missing."""
        self._store, self._rank, self._size = store, rank, size

    def announce(self, wait: int) -> None:
        """Announce that this rank is in wait number `wait`."""
        if self._store:
            self._store.set(f"wait {wait} {self._rank}", "")

    def missing(self, wait: int) -> Sequence[int]:
        """The ranks that have not announced it."""
        if not self._store:
            return [other for other in range(self._size) if other != self._rank]
        return [rank for rank in range(self._size) if not self._store.check([f"wait {wait} {rank}"])]


class Watchdog:
    """A thread that ends all ranks if this one has waited too long, and reports for which ranks and what.

    Waiting ranks announce themselves after a tenth of the limit. One that came later may be named as missing.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], step_s: float, arrivals: Arrivals, abort: Callable[[int], Any]
    ) -> None:
        """`hosts`: one per rank. `step_s`: what `inspect` returned. `abort(status)` ends all ranks."""
        self._rank, self._hosts, self.step_s, self._arrivals, self._abort = rank, hosts, step_s, arrivals, abort
        self._turn_s = TURN_S * min(rank, 10)
        self._number = 0
        self._noted: tuple[int, Sequence[str]] = 0, []  # a wait, and what had not arrived after a tenth of its limit
        self._wait: tuple[int, float, float, Callable[[], Sequence[str]]] | None = None  # number, begin, limit, names
        self.stopped = threading.Event()  # its world has ended, but not the process
        threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    @contextmanager
    def over(self, limit_s: float, names: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Around a wait for other ranks of at most `limit_s`. `names`: what has not arrived yet."""
        begin = time.monotonic()
        self._number += 1
        self._wait = self._number, begin, limit_s, names
        try:
            yield
        except RuntimeError as error:
            waited = time.monotonic() - begin
            # The inspector was first. A dead rank causes the same message, but at once.
            if "Horovod has been shut down" in str(error) and 2 * waited > limit_s:
                self._wait = None
                time.sleep(self._turn_s)
                number, names_then = self._noted
                self._end(self._number, waited, names_then if number == self._number else [LISTED])
            raise
        finally:
            self._wait = None

    def _run(self) -> None:
        tick_s, last = min(5.0, self.step_s / 10), time.monotonic()
        announced = current = 0
        waited = 0.0
        while not self.stopped.wait(tick_s):
            # A suspended job (scontrol suspend) did not wait meanwhile: count at most two ticks per iteration.
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick_s), now
            wait = self._wait
            if wait is None:
                continue
            number, begin, limit_s, names = wait
            waited = waited + passed if number == current else min(now - begin, passed)
            current = number
            if 10 * waited > limit_s and number > announced:  # early, so that all waiting ranks have when one asks
                announced = number
                self._noted = number, _safely(names)
                self._announce(number)
            if waited > limit_s + self._turn_s:
                self._end(number, limit_s, _safely(names))

    def _announce(self, number: int) -> None:
        try:
            answered(lambda: self._arrivals.announce(number), ANSWER_S)
        except RuntimeError as error:  # rank 0 is gone with its store: other ranks report that
            logs.report(f"rank {self._rank} cannot reach rank 0: {error}")

    def _end(self, number: int, waited_s: float, names: Sequence[str]) -> None:
        try:
            missing = answered(lambda: self._arrivals.missing(number), ANSWER_S)
        except RuntimeError:
            missing = [0]
        ranks = _shortened([f"rank {rank} on {self._hosts[rank]}" for rank in missing])
        what = _shortened(names)
        text = f"for {ranks} to reach {what}" if missing else f"for {what}, which all ranks have reached (NCCL?)"
        logs.report(
            f"rank {self._rank} on {self._hosts[self._rank]} has waited {waited_s:.0f} s {text}. Check the file"
            " systems and the GPU there (dmesg, nvidia-smi), then rerun with the same --output_dir to resume. If a step"
            f" may take that long, raise {ENDS_AFTER} (docs/guides/resume-and-reliability.md)."
        )
        self._abort(EXIT_FAILURE)


def answered(question: Callable[[], Any], limit_s: float) -> Any:
    """What `question` returns. Raises RuntimeError if it fails or takes longer than `limit_s`."""
    answers: queue.SimpleQueue[tuple[Any, RuntimeError | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except RuntimeError as error:
            answers.put((None, error))

    threading.Thread(target=ask, name="stall question", daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit_s)
    except queue.Empty:
        raise RuntimeError(f"no answer in {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return answer


def _safely(names: Callable[[], Sequence[str]]) -> Sequence[str]:
    """The step's thread may change the names while they are read."""
    try:
        return names()
    except RuntimeError:
        return ["the step's gradients"]


def _shortened(names: Sequence[str], maximum: int = 3) -> str:
    more = f" and {len(names) - maximum} more" if len(names) > maximum else ""
    return ", ".join(names[:maximum]) + more
