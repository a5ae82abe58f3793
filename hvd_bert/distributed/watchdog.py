"""Waiting for a rank that may never come: after how long that ends the job, and who is named.

Horovod's stall inspector (0.28.1) warns of a collective that some ranks have begun and others have not, and shuts
Horovod down after HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, by default never. Under Gloo it sees nothing (its list of ranks
is empty: `reserve` stands for `resize` in gloo_controller.cc). Under MPI it does not see a process that answers nothing
at all, since its own thread waits for that, nor a collective that all have begun and that hangs. So it is on, and each
rank has a `Watchdog` that keeps the same time, asks who else waits, and has the names for one message.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from hvd_bert.distributed import logs
from hvd_bert.errors import EXIT_FAILURE

DISABLED = "HOROVOD_STALL_CHECK_DISABLE"
WARNS_AFTER = "HOROVOD_STALL_CHECK_TIME_SECONDS"
ENDS_AFTER = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
WARN_S, END_S = 120, 600  # of a step's collectives: also a model that is compiled on one rank alone is done by then
LONGEST_S = 2 * 3600.0  # for ranks that wait for one that downloads, tokenises, scores or writes
TURN_S = 6.0  # between the words of two ranks: a launcher ends the second within 5 s of the first one's end
_TAG = 7  # of this module's messages


def inspect(environ: MutableMapping[str, str], elastic: bool) -> float:
    """Have the inspector end stalls, by the times that the user has set where there are any. Before `hvd.init`.

    Returns the seconds after which a step's collective is stalled, infinite for never.
    """
    if elastic:  # the next world would wait for the stalled rank, too: a warning is all that helps
        environ.setdefault(WARNS_AFTER, str(END_S))
        return math.inf
    end = _seconds(environ.get(ENDS_AFTER, "0"))
    fitting = max(1, min(WARN_S, end // 5)) if end else WARN_S
    warn = _seconds(environ.setdefault(WARNS_AFTER, str(fitting)))
    end = _seconds(environ.setdefault(ENDS_AFTER, str(max(END_S, 5 * warn))))
    disabled = _seconds(environ.get(DISABLED, "0")) > 0
    return math.inf if disabled or end == 0 or end < warn else end  # Horovod ignores an end before the warning


def _seconds(text: str) -> int:
    """As Horovod reads it."""
    number = re.match(r"\s*\+?(\d+)", text)
    return int(number[1]) if number else 0


class Arrivals(Protocol):
    """Who waits. The waits of a run have the same numbers on all ranks."""

    def announce(self, wait: int) -> None:
        """This rank is in that wait."""

    def missing(self, wait: int) -> Sequence[int]:
        """The ranks that have not said so."""


class UnknownArrivals:
    """Where ranks cannot tell each other: any of the others may be missing."""

    def __init__(self, rank: int, size: int) -> None:
        self._others = [other for other in range(size) if other != rank]

    def announce(self, wait: int) -> None:
        pass

    def missing(self, wait: int) -> Sequence[int]:
        return self._others


class StoreArrivals:
    """By a key-value store of torch's, which rank 0 keeps."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def announce(self, wait: int) -> None:
        self._store.set(f"wait {wait} {self._rank}", "")

    def missing(self, wait: int) -> Sequence[int]:
        return [rank for rank in range(self._size) if not self._store.check([f"wait {wait} {rank}"])]


class MpiArrivals:
    """By messages to rank 0; that another rank comes to ask means that those before it have not."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._waiting: set[tuple[int, int]] = set()

    def announce(self, wait: int) -> None:
        self._comm.isend((wait, self._comm.rank), dest=0, tag=_TAG)  # small: it is gone at once

    def missing(self, wait: int) -> Sequence[int]:
        if self._comm.rank > 0:
            return range(self._comm.rank)
        while self._comm.iprobe(tag=_TAG):
            self._waiting.add(self._comm.recv(tag=_TAG))
        return [rank for rank in range(self._comm.size) if (wait, rank) not in self._waiting]


class Watchdog:
    """Ends every rank, from a thread, when this one has waited too long for others, and says for whom and what.

    Ranks that wait say so after a tenth of the time; one that came later than that may still be named as missing.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], step_s: float, arrivals: Arrivals, abort: Callable[[int], Any]
    ) -> None:
        """`hosts`: of each rank. `step_s`: what `inspect` returned. `abort(status)` ends every rank."""
        self._rank, self._hosts, self.step_s, self._arrivals, self._abort = rank, hosts, step_s, arrivals, abort
        self._turn_s = TURN_S * min(rank, 10)
        self._number = 0
        self._wait: tuple[int, float, float, Callable[[], Sequence[str]]] | None = None  # number, begin, limit, names
        threading.Thread(target=self._run, name="stall watch", daemon=True).start()

    @contextmanager
    def over(self, limit_s: float, names: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Inside, wait for other ranks, no longer than that. `names`: of what has not come yet."""
        begin = time.monotonic()
        self._number += 1
        self._wait = self._number, begin, limit_s, names
        try:
            yield
        except RuntimeError as error:
            waited = time.monotonic() - begin
            # The inspector was first. A rank that died leaves the same words, but is noticed at once.
            if "Horovod has been shut down" in str(error) and 2 * waited > limit_s:
                self._wait = None
                time.sleep(self._turn_s)
                self._end(self._number, waited, ["the tensors that Horovod names above"])
            raise
        finally:
            self._wait = None

    def _run(self) -> None:
        tick_s, last = min(5.0, self.step_s / 10), time.monotonic()
        said = current = 0
        waited = 0.0
        while True:
            time.sleep(tick_s)
            # A job that was suspended (scontrol suspend) did not wait meanwhile: a look counts for two ticks at most.
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick_s), now
            wait = self._wait
            if wait is None:
                continue
            number, begin, limit_s, names = wait
            waited = waited + passed if number == current else min(now - begin, passed)
            current = number
            if 10 * waited > limit_s and number > said:  # early, so that all who wait have said so when one asks
                said = number
                self._tell(number)
            if waited > limit_s + self._turn_s:
                self._end(number, limit_s, _safely(names))

    def _tell(self, number: int) -> None:
        try:
            self._arrivals.announce(number)
        except RuntimeError as error:  # rank 0 is gone, and with it its store: others say it
            logs.report(f"rank {self._rank} cannot reach rank 0: {error}")

    def _end(self, number: int, waited_s: float, names: Sequence[str]) -> None:
        try:
            missing = self._arrivals.missing(number)
        except RuntimeError:
            missing = [0]
        ranks = _shortened([f"rank {rank} on {self._hosts[rank]}" for rank in missing])
        what = _shortened(names)
        text = f"for {ranks} to come to {what}" if missing else f"for {what}, to which all ranks have come (NCCL?)"
        logs.report(
            f"rank {self._rank} on {self._hosts[self._rank]} has waited {waited_s:.0f} s {text}. Look there at the file"
            " systems and the GPU (dmesg, nvidia-smi); the same command goes on from the last checkpoint. Where a step"
            f" is rightly so slow, set {ENDS_AFTER} higher (docs/guides/resume-and-reliability.md)."
        )
        self._abort(EXIT_FAILURE)


def _safely(names: Callable[[], Sequence[str]]) -> Sequence[str]:
    """The step's thread may change what is looked at here."""
    try:
        return names()
    except RuntimeError:
        return ["its gradients"]


def _shortened(names: Sequence[str], maximum: int = 3) -> str:
    more = f" and {len(names) - maximum} more" if len(names) > maximum else ""
    return ", ".join(names[:maximum]) + more
