"""`hvd-bert doctor` under srun checks all ranks and prints one verdict; alone, it prints commands for Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import read_report
from harness import RANK_INFOS, Cluster

pytestmark = pytest.mark.cluster
DOCTOR = "hvd-bert doctor --size 1 --verbose"


def test_under_srun(cluster: Cluster, tmp_path: Path) -> None:
    outcome = cluster.on("login", f"srun --nodes=2 --ntasks-per-node=2 --mpi=pmix {DOCTOR}", tmp_path).expect(0)
    cells = [line.split() for line in outcome.output.splitlines()]
    table = [tuple(row[:4]) for row in cells if len(row) > 4 and row[3] == "cpu"]
    assert table == [(host, str(rank), str(local), device) for rank, host, local, device in RANK_INFOS], outcome
    assert outcome.output.count("4 rank(s) on 2 host(s), on CPUs, connected through MPI") == 1, outcome
    assert outcome.output.count("start with `srun --mpi=pmix") == 1, outcome
    assert outcome.output.count("Ready: a training would start here") == 1, outcome


def test_proof_under_srun(cluster: Cluster, tmp_path: Path) -> None:
    command = "srun --nodes=2 --ntasks-per-node=1 --mpi=pmix hvd-bert doctor --prove --json"
    report = read_report(cluster.on("login", command, tmp_path).expect(0))
    assert (report["ready"], report["launcher"], len(report["ranks"])) == (True, "srun", 2)


def test_commands_of_slurm(cluster: Cluster, tmp_path: Path) -> None:
    for allocation, line in (("", "scripts/hvd.slurm"), ("salloc --nodes=2 ", "    srun --mpi=pmix python")):
        outcome = cluster.on("login", f"{allocation}hvd-bert doctor", tmp_path).expect(0)
        assert line in outcome.output, outcome
