"""Train four ranks on two hosts, over ssh and in Slurm jobs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from commands import losses, printed
from harness import HOSTS, JOB_SCRIPT, RANK_INFOS, SMALL, Cluster, listening, results

pytestmark = pytest.mark.cluster
STEPS = f"{SMALL} 4 --per_device_train_batch_size 4"  # the same global batch as in `one_process`


def check(folder: Path, controller: str, one_process: list[float], tolerance: float = 1e-5) -> None:
    """Check that a run had four ranks on both hosts, the controller, and the losses of one process."""
    found = results(folder)
    assert (found["world_size"], found["hosts"], found["controller"]) == (4, HOSTS, controller)
    assert [(r["rank"], r["host"], r["local_rank"], r["device"]) for r in found["ranks"]] == RANK_INFOS
    np.testing.assert_allclose(losses(folder), one_process, rtol=0, atol=tolerance)


def tokenised(env: dict[str, str]) -> Counter[str]:
    """Count the tables of windows that each host built."""
    return Counter(line.split()[0] for line in Path(env["WATCHED_LOG"]).read_text().splitlines())


def test_horovodrun_over_mpi_with_a_cache_per_node(
    cluster: Cluster, tmp_path: Path, one_process: list[float], watched: dict[str, str], listeners: Path
) -> None:
    env = watched | {"HVD_BERT_CACHE": str(cluster.local / "cache"), "WATCHED_LISTENERS": str(listeners)}
    command = f"horovodrun -np 4 -H a100-01:2,a100-02:2 python -m hvd_bert.train {STEPS} --output_dir out"
    outcome = cluster.on("login", command, tmp_path, env).expect(0)
    check(tmp_path / "out", "mpi", one_process)
    assert results(tmp_path / "out")["job"] is None
    assert "a100-02: rank 2 cpu, rank 3 cpu" in printed(outcome), outcome
    assert tokenised(env) == {"a100-01": 2, "a100-02": 2}  # train and dev, once per node
    for rank in range(4):  # as in docs/guides/cluster.md; only with libfabric, ranks also listen on eth0
        libfabric = {("rank", "eth0")}
        assert listening(listeners, rank) - libfabric == {("orted", "all"), ("orted", "loopback"), ("rank", "all")}


def test_horovodrun_over_gloo_with_a_shared_cache(
    cluster: Cluster, tmp_path: Path, one_process: list[float], watched: dict[str, str], listeners: Path
) -> None:
    command = "horovodrun -np 4 -H a100-01:2,a100-02:2 --gloo --network-interfaces eth0 python -m hvd_bert.train"
    env = watched | {"WATCHED_LISTENERS": str(listeners)}
    cluster.on("a100-01", f"{command} {STEPS} --output_dir out", tmp_path, env).expect(0)
    check(tmp_path / "out", "gloo", one_process)
    assert sum(tokenised(watched).values()) == 2
    here = {("launcher", "all"), ("rank", "eth0")}  # the rendezvous, and rank 0's store
    assert [listening(listeners, rank) for rank in range(4)] == [here, here, set(), set()]


def test_job_on_two_nodes(cluster: Cluster, tmp_path: Path, one_process: list[float]) -> None:
    job = cluster.submit(f"{JOB_SCRIPT} {STEPS} --output_dir out", tmp_path)
    ended = cluster.ended(job).expect(0)
    check(tmp_path / "out", "mpi", one_process)
    facts = {"id": job, "name": "hvd_bert", "partition": "gpu", "nodes": "a100-[01-02]", "tasks_per_node": "2"}
    assert results(tmp_path / "out")["job"].items() >= facts.items()
    for words in (f"Slurm job id {job}", "partition gpu", "a100-01: rank 0 cpu, rank 1 cpu", "step 4/4"):
        assert words in ended.out, ended
    assert "error" not in ended.err, ended
    assert {path.name for path in tmp_path.glob("hvd_bert-*")} == {f"hvd_bert-{job}.out", f"hvd_bert-{job}.err"}


def test_array_of_jobs_on_one_node_each(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(f"--nodes=1 --array=0-1 {JOB_SCRIPT} {SMALL} 2 --seed 7", tmp_path)
    for task, node in enumerate(HOSTS):
        cluster.ended(f"{job}_{task}").expect(0)
        own_id = cluster.show(f"{job}_{task}")["JobId"]
        found = results(tmp_path / "runs" / f"hvd_bert-{own_id}")
        assert (found["world_size"], found["hosts"], found["job"]["array"]) == (2, [node], f"{job}_{task}")


def test_srun_inside_salloc(cluster: Cluster, tmp_path: Path, watched: dict[str, str], listeners: Path) -> None:
    command = f"salloc --nodes=2 --ntasks-per-node=2 srun --ntasks=2 --mpi=pmix python -m hvd_bert.train {SMALL} 2"
    env = watched | {"WATCHED_LISTENERS": str(listeners)}
    outcome = cluster.on("login", f"{command} --output_dir out", tmp_path, env).expect(0)
    assert results(tmp_path / "out")["hosts"] == HOSTS
    slurm = {("slurmstepd", "all"), ("slurmstepd", "loopback")}
    for rank in range(2):
        assert listening(listeners, rank) - {("rank", "eth0")} == slurm | {("rank", "all")}
    assert outcome.output.count("The job requested 4 tasks, but only 2 rank(s) run.") == 1, outcome
