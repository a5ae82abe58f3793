"""A watchdog that ends the job if a rank stalls, and names that rank.

Horovod's stall inspector (0.28.1) reports nothing under Gloo: its list of ranks is empty (`reserve` instead of `resize`
in gloo_controller.cc). Under MPI it misses a frozen process, since its own thread waits for that rank, and a collective
that hangs although all ranks have started it. So each rank also has a `Watchdog` with the inspector's limit. It looks
up which ranks are waiting, and reports the other ranks as missing.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, TimeoutError  # before Python 3.11 not the built-in one
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from hvd_bert.distributed import logs
from hvd_bert.errors import EXIT_FAILURE

DISABLED = "HOROVOD_STALL_CHECK_DISABLE"
WARNS_AFTER = "HOROVOD_STALL_CHECK_TIME_SECONDS"
ENDS_AFTER = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
WARN_S, END_S = 120, 600  # limits in seconds for a step's collectives; longer than compiling a model takes
LONGEST_S = 2 * 3600.0  # limit in seconds while another rank downloads, tokenizes, evaluates or writes
TURN_S = 6.0  # seconds between two ranks' reports: after one rank ends, a launcher ends the others within 5 s
ANSWER_S = 10.0  # limit in seconds for an answer of the store, whose host may be unreachable
LISTED = "the tensors that Horovod lists above"


def configure_stall_limits(environ: MutableMapping[str, str], elastic: bool) -> float:
    """Set the time limits of Horovod's stall inspector, unless the user has. Call before `hvd.init`.

    Returns the seconds after which a step's collective counts as stalled; infinity means never.
    """
    if elastic:  # only warn: the next world would wait for the stalled rank, too
        environ.setdefault(WARNS_AFTER, str(END_S))
        return math.inf
    end = _seconds(environ.get(ENDS_AFTER, "0"))
    fitting = max(1, min(WARN_S, end // 5)) if end else WARN_S
    warn = _seconds(environ.setdefault(WARNS_AFTER, str(fitting)))
    end = _seconds(environ.setdefault(ENDS_AFTER, str(max(END_S, 5 * warn))))
    disabled = _seconds(environ.get(DISABLED, "0")) > 0
    return math.inf if disabled or end == 0 or end < warn else end  # Horovod ignores an `end` below `warn`


def _seconds(text: str) -> int:
    """Parse a number of seconds as Horovod does: leading digits count, and anything else is 0."""
    number = re.match(r"\s*\+?(\d+)", text)
    return int(number[1]) if number else 0


@dataclass
class _Wait:
    """A wait of this rank for other ranks.

    `number`: the wait's number, which is equal on all ranks. `deadline`: a time of `time.monotonic`. `names`: function
    that returns the names of the missing tensors or collectives. `announced`: these names at the time when this rank
    announced the wait; None before.
    """

    number: int
    limit_s: float
    deadline: float
    names: Callable[[], Sequence[str]]
    announced: Sequence[str] | None = None


class Watchdog:
    """A thread that ends all ranks if this rank waits too long, and reports the missing ranks and tensors.

    A rank announces its wait after a tenth of the limit. A rank that arrives later may be reported as missing.
    """

    def __init__(self, rank: int, hosts: Sequence[str], step_s: float, store: Any, abort: Callable[[int], Any]) -> None:
        """`hosts`: the host of each rank. `step_s`: the limit for a step's collective, from `configure_stall_limits`.

        `store`: a torch key-value store that rank 0 serves; if None, all other ranks are reported as missing. `abort`:
        function that ends all ranks, called with the exit status.
        """
        self._rank, self._hosts, self.step_s, self._store, self._abort = rank, hosts, step_s, store, abort
        self._turn_s = TURN_S * min(rank, 10)
        self._number = 0
        self._wait: _Wait | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join(2 * ANSWER_S)

    @contextmanager
    def limit_wait(self, limit_s: float, names: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Context manager: limit a wait for other ranks to `limit_s` seconds. `names`: see `_Wait`."""
        self._number += 1
        wait = self._wait = _Wait(self._number, limit_s, time.monotonic() + limit_s, names)
        try:
            yield
        except RuntimeError as error:
            # Horovod's inspector ended the wait first. A dead rank causes the same message, but sooner.
            if "Horovod has been shut down" in str(error) and time.monotonic() > wait.deadline - limit_s / 2:
                self._wait = None
                time.sleep(self._turn_s)
                self._end(wait)
            raise
        finally:
            self._wait = None

    def _run(self) -> None:
        tick_s, last = min(5.0, self.step_s / 10), time.monotonic()
        while not self._closed.wait(tick_s):
            now = time.monotonic()
            suspended_s, last = max(0.0, now - last - 2 * tick_s), now
            if wait := self._wait:
                wait.deadline += suspended_s  # time in a suspended job (scontrol suspend) does not count
                if wait.announced is None and now > wait.deadline - 0.9 * wait.limit_s:
                    self._announce(wait)  # early, so that all waiting ranks have announced it when one looks
                if now > wait.deadline + self._turn_s:
                    self._end(wait)
            del wait  # `names` may keep tensors alive

    def _announce(self, wait: _Wait) -> None:
        try:
            wait.announced = wait.names()
        except RuntimeError:  # the step's thread may change the names while they are read
            wait.announced = ["the step's gradients"]
        if self._store:
            with suppress(RuntimeError):  # rank 0 is gone with its store: `_end` reports that
                answered(lambda: self._store.set(_key(wait.number, self._rank), ""), ANSWER_S)

    def _missing(self, wait: int) -> Sequence[int]:
        """Return the ranks that have not announced this wait."""
        ranks = range(len(self._hosts))
        if not self._store:
            return [rank for rank in ranks if rank != self._rank]
        return [rank for rank in ranks if not self._store.check([_key(wait, rank)])]

    def _end(self, wait: _Wait) -> None:
        try:
            missing = answered(lambda: self._missing(wait.number), ANSWER_S)
        except RuntimeError:
            missing = [0]
        waited_s = wait.limit_s + min(0.0, time.monotonic() - wait.deadline)
        ranks = _shortened([f"rank {rank} on {self._hosts[rank]}" for rank in missing])
        names = _shortened(wait.announced or [LISTED])
        text = f"for {ranks} to reach {names}" if missing else f"for {names}, which all ranks have reached (NCCL?)"
        logs.report(
            f"rank {self._rank} on {self._hosts[self._rank]} has waited {waited_s:.0f} s {text}. Check the file"
            " systems and the GPU there (dmesg, nvidia-smi), then rerun with the same --output_dir to resume. If a step"
            f" may take that long, raise {ENDS_AFTER} (docs/guides/resume-and-reliability.md)."
        )
        self._abort(EXIT_FAILURE)


def _key(wait: int, rank: int) -> str:
    return f"wait {wait} {rank}"


def answered(question: Callable[[], Any], limit_s: float) -> Any:
    """Return the result of `question()`. Raises RuntimeError if it fails or takes longer than `limit_s` seconds."""
    future: Future[Any] = Future()

    def ask() -> None:
        try:
            future.set_result(question())
        except Exception as error:
            future.set_exception(RuntimeError(str(error)))

    threading.Thread(target=ask, name="stall question", daemon=True).start()
    try:
        return future.result(limit_s)
    except TimeoutError:
        raise RuntimeError(f"no answer in {limit_s:.0f} s") from None


def _shortened(names: Sequence[str], maximum: int = 3) -> str:
    more = f" and {len(names) - maximum} more" if len(names) > maximum else ""
    return ", ".join(names[:maximum]) + more
