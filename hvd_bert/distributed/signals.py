"""Stop requests: signals set a flag, and all ranks vote on stopping in each step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hvd_bert.distributed.horovod_world import NOTICES
from hvd_bert.distributed.world import World

# From a scheduler that ends or preempts the job, from the keyboard, and from job scripts (submitit sends SIGUSR2).
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
HOSTS = "hosts"  # Horovod elastic has hosts to add or remove


class StopRequests:
    """Whether this process was asked to stop, and whether any rank was."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._received: str | None = None
        self._stopping = False
        self._vote: Callable[[], bool] = lambda: False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle the signals inside. A second SIGINT (Ctrl-C again) ends the process at once.

        After a signal the others stay ignored: a launcher may repeat one, which must not change the exit status. A
        signal after the last vote is only noted, so the run completes.
        """
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                ignored = (self._stopping or self._received) and number != signal.SIGINT
                signal.signal(number, signal.SIG_IGN if ignored else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received == "SIGINT":
            raise KeyboardInterrupt
        self._received = signal.Signals(number).name

    def start_vote(self) -> None:
        """Start to ask all ranks whether any was asked to stop. The vote travels alongside the gradients."""
        self._vote = self._world.any_rank_async(self._received is not None or NOTICES.changed)

    def any_rank_stops(self) -> bool:
        """Wait for the result of the vote: whether any rank was asked to stop before it."""
        return self._vote()

    def reason(self) -> str | None:
        """Why the run stops now: the signals, with their ranks; None if only the hosts have changed. A collective."""
        received = self._world.allgather(self._received or (HOSTS if NOTICES.changed else None))
        named = [f"{name} to rank {rank}" for rank, name in enumerate(received) if name not in (None, HOSTS)]
        self._stopping = bool(named)
        return ", ".join(named) or None
