"""A launcher on one of two hosts is killed, or asked to stop: the ranks on both hosts save and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import signalled
from harness import HOROVODRUN_SCRIPT, SMALL, Cluster
from launch import Outcome

pytestmark = [pytest.mark.cluster, pytest.mark.alone]

HOSTS = "-H a100-01:1,a100-02:1"
TRAINER = f"{SMALL} 1000000 --no_do_eval --save_steps 0 --output_dir out"
COLD = {"HVD_BERT_TEST_COLD": "1"}  # ranks must be children of the launcher, and mpirun of horovodrun


def check(outcome: Outcome, folder: Path) -> None:
    assert not outcome.hung, outcome
    assert (folder / "out" / "latest").exists(), outcome  # with --save_steps 0 a stop writes the only checkpoint
    assert float(re.findall(r"all ended ([\d.]+) s", outcome.output)[0]) < 10, outcome


@pytest.mark.parametrize(
    ("hosts", "number"), [(f"{HOSTS} --network-interfaces eth0", "SIGKILL"), ("-H a100-01:2", "SIGTERM")]
)
def test_horovodrun_is_killed(cluster: Cluster, tmp_path: Path, hosts: str, number: str) -> None:
    launch = f"horovodrun -np 2 {hosts} --mpi python -m hvd_bert.train {TRAINER}"
    check(cluster.on("a100-01", f"python {signalled.__file__} {number} {launch}", tmp_path, COLD), tmp_path)


def test_script_is_stopped_on_a_host_without_ranks(cluster: Cluster, tmp_path: Path) -> None:
    launch = f"bash {HOROVODRUN_SCRIPT} {HOSTS} --mpi -- {TRAINER}"
    check(cluster.on("login", f"python {signalled.__file__} SIGINT {launch}", tmp_path, COLD), tmp_path)
