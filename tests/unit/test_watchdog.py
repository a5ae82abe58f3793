"""Stall watchdog: time limits of waiting for other ranks, and the ranks and tensors it reports."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing in torch's type stubs

from hvd_bert.distributed import watchdog
from hvd_bert.distributed.watchdog import DISABLED, ENDS_AFTER, WARNS_AFTER, Watchdog
from hvd_bert.errors import EXIT_FAILURE

SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ({}, (120, 600)),
        ({WARNS_AFTER: "900"}, (900, 4500)),  # Horovod ignores a shutdown time below the warning time, so it grows
        ({ENDS_AFTER: "60"}, (12, 60)),
        ({ENDS_AFTER: "3"}, (1, 3)),
        ({ENDS_AFTER: "0"}, (120, math.inf)),
        ({WARNS_AFTER: "100", ENDS_AFTER: "50"}, (100, math.inf)),
        ({DISABLED: "1"}, (120, math.inf)),
        ({WARNS_AFTER: " 30s"}, (30, 600)),  # the leading number counts, as with strtol
    ],
)
def test_limits_are_the_users_or_consistent_with_them(given, times):
    environ, (warns, ends) = dict(given), times
    assert watchdog.configure_stall_limits(environ, elastic=False) == ends
    assert given.items() <= environ.items()
    assert int(environ[WARNS_AFTER].strip(" s")) == warns
    assert ends in (math.inf, int(environ[ENDS_AFTER]))
    assert watchdog.configure_stall_limits(environ, elastic=False) == ends


def test_under_elastic_a_stall_is_only_a_warning():
    environ: dict[str, str] = {}
    assert watchdog.configure_stall_limits(environ, elastic=True) == math.inf
    assert environ == {WARNS_AFTER: "600"}


@pytest.fixture
def end(monkeypatch, capsys) -> Callable[..., str]:
    """Return `wait_for_end(rank, *present)`, which lets a wait of `rank` time out and returns its report.

    `present`: other ranks that have announced the same wait.
    """

    def wait_for_end(rank: int, *present: int, store: Any = None, names: list[str]) -> str:
        store, ended = store or HashStore(), threading.Event()
        for other in present:
            store.set(f"wait 2 {other}", "")
        statuses: list[int] = []
        stall_watchdog = Watchdog(
            rank,
            ["a100-01", "a100-01", "a100-02", "a100-02"],
            0.1,
            store,
            lambda status: (statuses.append(status), ended.set(), threading.Event().wait()),
        )
        with stall_watchdog.limit_wait(0.1, lambda: pytest.fail("it is over")):
            pass
        assert not ended.wait(0.3), "a wait that is over ends nothing"
        with stall_watchdog.limit_wait(0.1, lambda: names):
            assert ended.wait(60)
        assert statuses == [EXIT_FAILURE]
        return capsys.readouterr().err

    return wait_for_end


def test_collective_that_hangs_on_all_ranks(end):
    assert "has waited 0 s for a.weight, which all ranks have reached" in end(0, 1, 2, 3, names=["a.weight"])


def test_store_that_does_not_answer_means_that_rank_0_is_missing(end, monkeypatch):
    monkeypatch.setattr(watchdog, "TURN_S", 0.0)
    monkeypatch.setattr(watchdog, "ANSWER_S", 0.1)
    store = SimpleNamespace(set=lambda key, value: None, check=lambda keys: threading.Event().wait())
    assert "for rank 0 on a100-01 to reach a.weight" in end(1, store=store, names=["a.weight"])


@pytest.mark.parametrize(("waited", "message", "ends"), [(301, SHUT_DOWN, 1), (299, SHUT_DOWN, 0), (301, "other", 0)])
def test_wait_that_horovods_stall_inspector_ended_is_a_stall(monkeypatch, capsys, waited, message, ends):
    statuses: list[int] = []
    stall_watchdog = Watchdog(0, ["one", "two"], 600, HashStore(), statuses.append)
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    with pytest.raises(RuntimeError), stall_watchdog.limit_wait(600, list):
        now[0] += waited
        raise RuntimeError(message)
    assert statuses == [EXIT_FAILURE] * ends
    assert (watchdog.LISTED in capsys.readouterr().err) == ends


def test_names_are_reported_after_horovods_stall_inspector(monkeypatch, capsys):
    store, arrived = HashStore(), threading.Event()
    stall_watchdog = Watchdog(0, ["one", "two"], 0.1, store, lambda _: None)
    with pytest.raises(RuntimeError), stall_watchdog.limit_wait(10, lambda: [] if arrived.is_set() else ["a weight"]):
        store.wait(["wait 1 0"])  # the rank announces its wait after 1 s
        arrived.set()  # Horovod no longer lists tensor names
        now = watchdog.time.monotonic()
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: now + 9)
        raise RuntimeError("Horovod has been shut down")
    assert "to reach a weight. " in capsys.readouterr().err


@pytest.mark.parametrize(("ticks", "ends"), [([1] * 5 + [1000] + [1] * 3, False), ([1] * 5 + [1000] + [1] * 4, True)])
def test_suspended_time_does_not_count(monkeypatch, ticks, ends):
    statuses: list[int] = []
    with monkeypatch.context() as patched:  # the test itself calls `_run`, with its own clock
        patched.setattr(threading.Thread, "start", lambda self: None)
        stall_watchdog = Watchdog(0, ["one", "two"], 10, HashStore(), statuses.append)
    now, remaining = [0.0], [*ticks]

    def wait(seconds: float) -> bool:
        if remaining:
            now[0] += remaining.pop(0)
            return False
        return True

    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stall_watchdog._closed, "wait", wait)
    with stall_watchdog.limit_wait(10, list):
        stall_watchdog._run()
    assert statuses == [EXIT_FAILURE] * ends
