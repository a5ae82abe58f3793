"""scripts/scaling.slurm sweeps over two hosts in a Slurm job, is requeued, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import HOSTS, REPOSITORY, Cluster
from test_preemption import cancel, start_again, wait_for

pytestmark = pytest.mark.cluster
SCRIPT = REPOSITORY / "scripts" / "scaling.slurm"


def test_sweep_over_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    options = "--nodes=2 --ntasks-per-node=1 --gres=none --cpus-per-task=1"
    flags = "--strategies none,horovod --ranks 2,3 --repeats 1 --steps 2 --global_batch 6 --out sweep"
    data = "--config sample --max_train_samples 64"
    job = cluster.submit(f"{options} {SCRIPT} {flags} {data}", tmp_path, {"HVD_BERT_CACHE": str(tmp_path / "cache")})
    wait_for(cluster, job, "[1/3]")
    cancel(cluster, "--batch", "--signal=USR1", job)
    start_again(cluster, job, tmp_path)
    ended = cluster.ended(job, timeout=900).expect(1)  # because a point was skipped
    assert f"Slurm job {job} has a time limit: requeueing it after 1 of 3 points.\n" in ended.out, ended
    assert ended.out.count("[1/3]") == 1, ended
    points = {point["name"]: point for point in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]}
    states = {name: (point["state"], point["reason"]) for name, point in points.items()}
    too_many = ("skipped", "3 ranks, but the Slurm job has 2 tasks: raise --nodes or --ntasks-per-node of sbatch")
    done = dict.fromkeys(("none-1-strong-1", "horovod-2-strong-1"), ("done", ""))
    assert states == done | {"horovod-3-strong-1": too_many}, ended
    for name, hosts in (("none-1", HOSTS[:1]), ("horovod-2", HOSTS)):
        results = json.loads((tmp_path / "sweep" / f"{name}-strong-1" / "train_results.json").read_text())
        assert (results["hosts"], results["global_batch"], results["job"]["id"]) == (hosts, 6, job), ended
        assert "--mpi=pmix" in points[f"{name}-strong-1"]["command"]
