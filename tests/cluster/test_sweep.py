"""scripts/scaling.slurm: a sweep over two hosts in a Slurm job, with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import HOSTS, REPOSITORY, Cluster
from test_preemption import Pretended, start_again

pytestmark = pytest.mark.cluster
SCRIPT = REPOSITORY / "scripts" / "scaling.slurm"


def test_sweep_over_two_hosts(cluster: Cluster, tmp_path: Path) -> None:
    options = "--nodes=2 --ntasks-per-node=1 --gres=none --cpus-per-task=1"
    flags = "--strategies none,horovod,ddp --ranks 2,3 --repeats 1 --steps 2 --global_batch 6 --out sweep"
    data = "--config sample --max_train_samples 64"
    job = cluster.submit(f"{options} {SCRIPT} {flags} {data}", tmp_path, {"HVD_BERT_CACHE": str(tmp_path / "cache")})
    ended = cluster.ended(job, timeout=900).expect(0)
    assert "attempt 1" in ended.out and "results in sweep\n" in ended.out, ended
    points = {point["name"]: point for point in json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]}
    states = {name: (point["state"], point["reason"]) for name, point in points.items()}
    too_many = ("skipped", "3 ranks, but the Slurm job has 2 tasks: raise --nodes or --ntasks-per-node of sbatch")
    assert states == {
        "none-1-strong-1": ("done", ""),
        "horovod-2-strong-1": ("done", ""), "horovod-3-strong-1": too_many,
        "ddp-2-strong-1": ("done", ""), "ddp-3-strong-1": too_many,
    }, ended  # fmt: skip
    for name, hosts in (("none-1", HOSTS[:1]), ("horovod-2", HOSTS), ("ddp-2", HOSTS)):
        results = json.loads((tmp_path / "sweep" / f"{name}-strong-1" / "train_results.json").read_text())
        assert (results["hosts"], results["global_batch"], results["job"]["id"]) == (hosts, 6, job), ended
        assert "--mpi=pmix" in points[f"{name}-strong-1"]["command"]


# Finishes one point in total, warns the job script as Slurm would, and stops at the signal that the script forwards.
STOPPED = r"""
printf 'asked:%s\n' "$(printf ' <%s>' "$@")"
mkdir -p out
echo '"state": "done"' >out/sweep.json
trap 'exit 75' USR1
kill "-USR$((${SLURM_RESTART_COUNT:-0} + 1))" "$PPID" # USR1, then USR2
while :; do sleep 0.1; done
"""


def test_time_limit_requeues_as_long_as_points_are_finished(
    cluster: Cluster, tmp_path: Path, pretended: Pretended
) -> None:
    job = cluster.submit(f"{SCRIPT} --ranks 1,4 --out out", tmp_path, pretended(STOPPED))
    start_again(cluster, job, tmp_path)
    ended = cluster.ended(job).expect(75)
    asked = "asked: <-m> <hvd_bert> <bench> <sweep> <--launcher> <srun> <--ranks> <1,4> <--out> <out>"
    first, second = ended.out.split("attempt 2", 1)
    assert asked in first and asked in second, ended
    assert "(signal USR1)" in first and "(signal USR2)" in second, ended
    assert "scaling.slurm: requeueing: the next attempt resumes from out/" in first, ended
    assert "not requeued: this attempt finished no point" in second, ended
