"""Start on eight hosts whose interfaces have different names, stop by a signal, and resume on four hosts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import losses
from harness import FOLDER, JOB_SCRIPT, SMALL, Cluster, new_environment, started_cluster
from test_preemption import cancel, wait_for

# A campaign, because 16 interpreters start: the fork server serves only the cluster of two nodes.
pytestmark = [pytest.mark.cluster, pytest.mark.campaign, pytest.mark.timeout(3600)]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
COLD = {"HVD_BERT_VENV": sys.prefix, "PATH": PATH}
STOP_STEP = 8
TRAIN = f"{SMALL} 12 --global_batch 16 --learning_rate 1e-4 --no_do_eval --save_steps 0"
TIMEOUT_S = 900.0


@pytest.fixture
def eight() -> Iterator[Cluster]:
    """A cluster of eight nodes."""
    with started_cluster(HVD_BERT_CLUSTER_HOSTS="8", HVD_BERT_CLUSTER_OWN_INTERFACES="yes") as cluster:
        yield cluster


def waiting(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose ranks wait for a signal in step STOP_STEP (altered.py)."""
    folder = new_environment(tmp_path / "waiting", f'exec "{sys.executable}" "{FOLDER / "altered.py"}" "$@"')
    return {"HVD_BERT_VENV": str(folder.parent), "WAITING_STEP": str(STOP_STEP), "PATH": f"{folder}:{PATH}"}


def test_eight_hosts_stop_and_resume_on_four(eight: Cluster, tmp_path: Path) -> None:
    command = f"python -m hvd_bert.train {TRAIN} --output_dir whole --strategy none"
    eight.on("a100-01", command, tmp_path, COLD, timeout=TIMEOUT_S).expect(0)
    job = eight.submit(
        f"--nodes=8 --ntasks-per-node=2 {JOB_SCRIPT} {TRAIN} --output_dir out", tmp_path, waiting(tmp_path)
    )
    wait_for(eight, job, '"loss"', tmp_path / "out" / "metrics.jsonl", timeout=TIMEOUT_S)
    cancel(eight, "--signal=TERM", job)
    facts = eight.wait(job, "PENDING", restarts=1, timeout=TIMEOUT_S)
    cancel(eight, job)
    out = Path(facts["StdOut"]).read_text()
    assert "16 rank(s) on a100-01, a100-02, a100-03, a100-04, a100-05, a100-06, a100-07, a100-08" in out
    assert f"requeueing it after step {STOP_STEP}." in out

    job = eight.submit(f"--nodes=4 --ntasks-per-node=2 {JOB_SCRIPT} {TRAIN} --output_dir out", tmp_path, COLD)
    ended = eight.ended(job, timeout=TIMEOUT_S).expect(0)
    assert f"Resuming from step {STOP_STEP}" in ended.out, ended
    found = json.loads((tmp_path / "out" / "train_results.json").read_text())
    assert (found["world_size"], len(found["hosts"]), found["controller"]) == (8, 4, "mpi")
    np.testing.assert_allclose(losses(tmp_path / "out"), losses(tmp_path / "whole"), rtol=0, atol=1e-4)
