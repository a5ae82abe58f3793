"""Faults on two hosts: training continues, or all ranks end and training resumes bit for bit."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import faults
import pytest
import resuming
from disturbed import STALL_S, Disturbed, ends
from faults import Fault
from harness import HOSTS, Cluster

from hvd_bert.tools.runs.failure import first_failure

pytestmark = [pytest.mark.cluster, pytest.mark.campaign, pytest.mark.timeout(1800)]
MEASURED = os.environ.get("HVD_BERT_MEASURED")  # file for one line per case, for docs/evidence/failing-clusters.md
WAITED = rf"rank (0|1) on a100-0[12] has waited {STALL_S} s for rank (1|0) on a100-0[12] to reach "
KILLED = r"rank 1 on a100-02: (signal 9 \(Killed\)|exit code 255 of ssh: killed by a signal|Killed|Out Of Memory)"
TIMED_OUT = r"rank \d on a100-0\d: .*HorovodInternalError: .*Timed out waiting 30000ms for recv"  # Gloo's own limit


@dataclass(frozen=True)
class Case:
    """A fault during a training of two ranks, one per host, and the expected result.

    Attributes:
        fault: The fault that occurs before a step.
        lasts_s: Seconds until the fault is repaired; None: it is repaired after the training has ended.
        first: Pattern of the first reported failure; None: training continues to the end.
        may_continue: Whether training may also continue to the end, because the failure depends on chance.
        within_s: Seconds within which the launcher and the ranks must end.
        remains: Processes that do not end before the host is repaired.
        launchers: Keys of LAUNCHERS, separated by spaces.
        before: Called before the training starts.
    """

    fault: Fault
    lasts_s: float | None = None
    first: str | None = None
    within_s: float = 60.0
    remains: tuple[str, ...] = ()
    launchers: str = "mpi gloo ddp"
    before: Callable[[Disturbed], None] = lambda run: None
    may_continue: bool = False


CASES = {
    "link down for 5 s": Case(faults.link_down, 5.0),
    "link down": Case(faults.link_down, first=WAITED, within_s=240.0, launchers="gloo srun ddp"),
    # torchrun's agent waits without a limit for an answer from the store on the other host
    # (docs/evidence/failing-clusters.md).
    "link down, c10d": Case(faults.link_down, None, WAITED, 240.0, ("torchrun on a100-02",), launchers="c10d"),
    "30 % packet loss": Case(
        partial(faults.slow_link, loss=0.3), within_s=300.0, before=faults.patient, launchers="mpi ddp"
    ),
    "30 % packet loss, gloo": Case(
        partial(faults.slow_link, loss=0.3),
        None,
        TIMED_OUT,
        300.0,
        launchers="gloo",
        before=faults.patient,
        may_continue=True,
    ),
    "200 ms delay": Case(partial(faults.slow_link, latency_ms=200.0), within_s=300.0, before=faults.patient),
    "rank stopped for 5 s": Case(faults.stopped, 5.0),
    "rank stopped": Case(faults.stopped, first=WAITED, launchers="mpi srun"),
    "rank stopped, torchrun": Case(faults.stopped, first=WAITED, before=faults.cold, launchers="ddp c10d"),
    "rank stopped, gloo": Case(faults.stopped, first=WAITED, remains=("1",), launchers="gloo"),
    "out of memory": Case(faults.out_of_memory, first=KILLED, launchers="mpi gloo srun"),
}
ROWS = [(name, launcher) for name, case in CASES.items() for launcher in case.launchers.split()]


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that takes a launcher and returns the output folder of a run without a fault."""
    made: dict[str, Path] = {}

    def make(launcher: str) -> Path:
        if launcher not in made:
            run = Disturbed(cluster, tmp_path_factory.mktemp(launcher), launcher)
            run.train().expect(0)
            made[launcher] = run.out
        return made[launcher]

    return make


@pytest.mark.parametrize(("name", "launcher"), ROWS, ids=[f"{name}-{launcher}" for name, launcher in ROWS])
def test_failing_cluster(
    cluster: Cluster, tmp_path: Path, undisturbed: Callable[[str], Path], name: str, launcher: str
) -> None:
    case, expected = CASES[name], undisturbed(launcher)
    run = Disturbed(cluster, tmp_path, launcher)
    case.before(run)
    with run.waiting_at_gate(case.within_s) as training:
        with case.fault(run):
            run.go()
            begin = time.time()
            if case.lasts_s is None:
                training.result()
            else:
                time.sleep(case.lasts_s)  # the fault's duration
        outcome = training.result()
    (tmp_path / "log").write_text(outcome.output)
    ended = ends(run.gates)
    seconds = {who: at and round(at - begin, 1) for who, at in ended.items()}
    first = first_failure(outcome.output.splitlines(), HOSTS)
    record(name, launcher, outcome.status, seconds, first)
    assert not outcome.hung, outcome
    assert {who for who, at in ended.items() if at is None} == set(case.remains), outcome
    assert max(at for at in seconds.values() if at) < case.within_s, outcome
    if case.first is None or (case.may_continue and outcome.status == 0):
        outcome.expect(0)
    else:
        assert outcome.status != 0 and re.match(case.first, first), (first, outcome)
        run.train().expect(0)
    assert resuming.differences(expected, run.out) == []


def record(name: str, launcher: str, status: int, seconds: dict[str, float | None], first: str) -> None:
    """Append the result to the file HVD_BERT_MEASURED, if set."""
    if MEASURED:
        row = {"case": name, "launcher": launcher, "status": status, "seconds": seconds, "first": first}
        with open(MEASURED, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
