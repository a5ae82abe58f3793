"""A launcher is killed or asked to stop, also on a host without ranks: the ranks on all hosts save and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import signalled
from harness import HOROVODRUN_SCRIPT, SMALL, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

HOSTS = "-H a100-01:1,a100-02:1"
TRAINER = f"{SMALL} 1000000 --no_do_eval --save_steps 0 --output_dir out"
COLD = "HVD_BERT_TEST_COLD"  # horovodrun must be the process that is signalled; its ranks need not be
HOROVODRUN = f"env {COLD}=1 horovodrun -np 2 %s --mpi env -u {COLD} python -m hvd_bert.train {TRAINER}"
# host of the launcher, signal to it, and its command; each resumes what the one before saved
STOPS = [
    ("login", "SIGKILL", HOROVODRUN % HOSTS),
    ("a100-01", "SIGINT", HOROVODRUN % "-H a100-01:2"),
    ("login", "SIGTERM", f"bash {HOROVODRUN_SCRIPT} {HOSTS} --mpi -- {TRAINER}"),
]


def test_ranks_save_when_their_launcher_is_stopped(cluster: Cluster, tmp_path: Path) -> None:
    before = 0
    for host, number, launch in STOPS:
        outcome = cluster.on(host, f"python {signalled.__file__} {number} {launch}", tmp_path)
        assert not outcome.hung, outcome
        assert float(re.findall(r"all ended ([\d.]+) s", outcome.output)[0]) < 10, outcome
        step = int(re.findall(r"Stopped after step (\d+) by SIGUSR1", outcome.output)[0])
        assert step > before and ("Resuming" in outcome.output) == bool(before), outcome
        before = step
