"""Stop requests: a signal sets a flag, and in each step all ranks vote on stopping. `Checkpoints.save_and_stop`
(training/saving.py) then saves and ends the run.

Ranks also watch some launchers (`is_watched` in launchers.py). Otherwise they would keep running after their launcher
is killed, with their GPU and the lock of the output folder. Slurm ends its tasks itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING

from hvd_bert.distributed import logs
from hvd_bert.errors import log
from hvd_bert.streams import in_main_thread

if TYPE_CHECKING:
    from hvd_bert.distributed.world import World  # for type checking only, since it imports torch

# Sent by schedulers that end or preempt a job, Ctrl-C, job scripts (submitit sends SIGUSR2) or a closing terminal.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
WARNINGS = {signal.SIGUSR1, signal.SIGUSR2}
ENDING = {signal.SIGTERM, signal.SIGINT}  # a second one ends the run at once; launchers may repeat other signals
SAME_S = 1.0  # seconds in which a repeated signal is the same request: `timeout` and some schedulers send it twice
CTRL_C = "Ctrl-C"
BY_HOROVODRUN = "OMPI_MCA_horovodrun_ctrl_c"  # holds the name of the signal sent for Ctrl-C (env/mpirun_process.py)
FOLDER = "a move or removal of --output_dir"
CHECK_S = 1.0


class StopRequests:
    """Stop requests that this process has received, and the vote on stopping all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._received: str | None = None
        self._stopping = False
        self._vote: Callable[[], bool] = lambda: False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: handle SIGNALS in the block, except an ignored SIGHUP (nohup). For example:

            0.0 s   SIGTERM   stop after this step
            0.2 s   SIGTERM   within SAME_S of the first SIGTERM: the same request
            0.5 s   SIGINT    the first SIGINT: stop after this step
            3.0 s   SIGTERM   the second SIGTERM: end all ranks at once with status 143

        A signal after the last vote does not stop the run, which completes.
        """
        if not _may_handle():
            log.info("Signals such as SIGTERM are left to this program, and save no checkpoint.")
            yield
            return
        handled = SIGNALS[:-1] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else SIGNALS
        before = {number: signal.signal(number, self._receive) for number in handled}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._end_at_second, args=(reader,), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier)
            os.write(writer, b"\0")
            thread.join(CHECK_S)
            os.close(writer)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._ignored_afterwards(number) else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._received = CTRL_C if name in ("SIGINT", os.environ.get(BY_HOROVODRUN)) else name

    def _end_at_second(self, reader: int) -> None:
        """End all ranks at a second SIGTERM or SIGINT. Runs in a thread: long torch operations delay `_receive`."""
        first: dict[int, float] = {}  # time of each signal's first arrival
        with open(reader, "rb", buffering=0) as numbers:
            while (received := numbers.read(1)) and (number := received[0]):  # `watched` writes 0 to end this thread
                now = time.monotonic()
                if number in ENDING and number not in first:
                    first[number] = now
                    log.info("%s: stopping after this step; again to quit", signal.Signals(number).name)
                elif number in ENDING and now - first[number] > SAME_S:
                    logs.report(f"hvd_bert: ended by a second {signal.Signals(number).name}")
                    self._world.abort(128 + number)

    def _ignored_afterwards(self, number: int) -> bool:
        """Return whether to ignore a signal after the block of `watched`."""
        # A launcher may repeat a signal, which must not change the exit status.
        if (self._stopping or self._received) and number != signal.SIGINT:
            return True
        # Slurm's warning before the time limit must not end the final evaluation, which may still finish in time.
        return self._world.launcher == "srun" and number in WARNINGS

    def stop_without_folder(self) -> None:
        """Request a stop because the output folder is gone. Call on rank 0."""
        self._received = self._received or FOLDER

    def start_vote(self) -> None:
        """Start a vote on whether to stop for a signal or changed hosts. It runs alongside the gradients' allreduce."""
        self._vote = self._world.any_rank_async(self._received is not None or self._world.process.hosts_changed)

    def any_rank_stops(self) -> bool:
        """Wait for the vote, and return whether any rank voted to stop."""
        return self._vote()

    def reason(self) -> str | None:
        """Return why the run stops: a signal, with its ranks unless all got it, or FOLDER.

        Returns None if only hosts have changed. All ranks must call this.
        """
        by_rank = self._world.allgather(self._received)
        asked = {name: [rank for rank, theirs in enumerate(by_rank) if theirs == name] for name in by_rank if name}
        self._stopping = bool(asked)
        named = [
            name if name == FOLDER or len(ranks) == len(by_rank) else f"{name} to {logs.describe_ranks(ranks)}"
            for name, ranks in asked.items()
        ]
        return ", ".join(named) or None


def _may_handle() -> bool:
    """Return whether the run may set signal handlers.

    It may not in a thread (Streamlit, Gradio, Ray Train), a notebook, a Ray process or a program that handles Ctrl-C.
    """
    handler, ray = signal.getsignal(signal.SIGINT), sys.modules.get("ray")
    own = callable(handler) and handler is not signal.default_int_handler
    return in_main_thread() and not (own or hasattr(sys, "ps1") or (ray and ray.is_initialized()))


@cache  # one thread, even if a program trains several times
def watch_launcher(is_watched: bool) -> None:
    """If `is_watched`, start a thread that sends this process SIGUSR1 when its launcher ends. All ranks then stop.

    Not SIGTERM: the launcher may already have forwarded one, and a second SIGTERM ends a run that is still saving.
    """
    if is_watched:
        threading.Thread(target=_stop_when_cut, args=(os.getppid(),), name="launcher watch", daemon=True).start()


def _stop_when_cut(parent: int) -> None:
    while os.getppid() == parent:  # changes when the launcher ends
        time.sleep(CHECK_S)
    with suppress(OSError):  # standard error may have no reader any more
        os.write(2, b"hvd_bert: the launcher was killed: stopping this rank\n")
    os.kill(os.getpid(), signal.SIGUSR1)
