"""Two hosts without a common /tmp: each launcher trains, and a training with an output folder in /tmp resumes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import resuming
from disturbed import Disturbed, ends
from harness import HOSTS, Cluster, started_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.campaign, pytest.mark.timeout(1200)]
BIN = Path(sys.executable).parent
# Without the fork server: its programs are in /tmp, which the hosts do not share.
COLD = {"PATH": f"{BIN}:{os.environ['PATH']}", "HVD_BERT_VENV": str(BIN.parent), "HF_HOME": None}


@pytest.fixture
def apart() -> Iterator[Cluster]:
    """A cluster whose nodes share the cluster's folder, but not /tmp."""
    with started_cluster(HVD_BERT_CLUSTER_OWN_TMP="yes") as cluster:
        yield cluster


def training(cluster: Cluster, name: str, launcher: str) -> Disturbed:
    folder = cluster.state / "shared" / launcher / name
    folder.mkdir(parents=True)
    run = Disturbed(cluster, folder, launcher)
    run.env |= COLD
    # on.sh moves Open MPI's session folders away from /tmp. Use the default, /tmp.
    run.launch = f"env --unset=OMPI_MCA_orte_tmpdir_base {run.launch}"
    return run


@pytest.mark.parametrize("launcher", ["mpi", "gloo", "srun", "ddp"])
def test_trains_and_resumes(apart: Cluster, launcher: str) -> None:
    whole, killed = training(apart, "whole", launcher), training(apart, "killed", launcher)
    for host in HOSTS:
        assert apart.state.parent != Path("/tmp") or "pytest" not in killed.on(host, "ls", "/tmp")
    whole.train().expect(0)
    killed.out = Path(f"/tmp/{launcher}")  # a folder on rank 0's host only
    with killed.waiting_at_gate(60.0) as outcome:
        killed.on(HOSTS[1], "kill", "-KILL", str(killed.pid(1)))
        killed.go()
        assert outcome.result().status != 0, outcome.result()
    assert None not in ends(killed.gates).values(), outcome.result()
    assert "Resuming from step 4" in killed.train().expect(0).output
    killed.on(HOSTS[0], "cp", "--recursive", killed.out, killed.folder / "out")
    assert resuming.differences(whole.out, killed.folder / "out") == []
    assert not Path(killed.out).exists()
