"""Signals request a stop; a second Ctrl-C ends the run at once."""

from __future__ import annotations

import os
import signal

import pytest
from test_world import heard, make_world

from hvd_bert.distributed.horovod_world import NOTICES
from hvd_bert.distributed.signals import HOSTS, SIGNALS, StopRequests


def stops(requests: StopRequests) -> bool:
    requests.start_vote()
    return requests.any_rank_stops()


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_asks_to_stop(number):
    requests = StopRequests(make_world())
    with requests.watched():
        assert not stops(requests)
        os.kill(os.getpid(), number)
        assert stops(requests)
    assert requests.reason() == f"{signal.Signals(number).name} to rank 0"


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequests(make_world()).watched():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_repeated_signal_does_not_end_a_process_that_stops():
    requests = StopRequests(make_world())
    before = signal.getsignal(signal.SIGINT)
    with requests.watched():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stops(requests) and requests.reason()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_second_interrupt_ends_at_once(first):
    requests = StopRequests(make_world())
    with requests.watched():
        os.kill(os.getpid(), first)
        if first != signal.SIGINT:
            os.kill(os.getpid(), signal.SIGINT)  # the first Ctrl-C may come after the scheduler's signal
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_hosts_that_change_are_no_reason_to_end(monkeypatch):
    requests = StopRequests(make_world())
    monkeypatch.setattr(NOTICES, "changed", False)  # restored at the end
    NOTICES.on_hosts_updated(0.0, 2)
    assert stops(requests)
    assert requests.reason() is None


def test_any_ranks_signal_counts_more_than_hosts():
    requests = StopRequests(heard(make_world(rank=0, size=3), ["", "SIGTERM", HOSTS]))
    assert requests.reason() == "SIGTERM to rank 1"
