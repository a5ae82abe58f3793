"""Failures on two hosts: the job ends soon with a non-zero status, and reports the cause and its host once."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from harness import HOSTS, SMALL, Cluster, results
from test_job_script import by_launcher

from hvd_bert.tools.runs.failure import first_failure

pytestmark = pytest.mark.cluster

FAILED = r"rank \d on \S+ failed:"  # the failure of any rank, but not Open MPI's "readv failed:"
IMPORT = "ModuleNotFoundError: No module named 'hvd_bert.evaluation.evaluator'"
STALL_TIMES = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
WAITED = "rank 0 on a100-01 has waited 4 s for rank 1 on a100-02 to reach "


def seconds_since_failure(env: dict[str, str]) -> float:
    (failed,) = [line for line in Path(env["WATCHED_LOG"]).read_text().splitlines() if line.startswith("failed")]
    return time.time() - float(failed.split()[1])


def faults(fault: str) -> dict[str, str]:
    return {"WATCHED_FAULT": fault} | (STALL_TIMES if fault == "stall" else {})


@pytest.mark.parametrize(
    ("launcher", "fault", "once", "first"),
    [
        ("pmix", "kill", "srun: error: a100-02: task 1: Killed", "rank 1 on a100-02: Killed"),
        ("pmix", "stall", WAITED, WAITED),
        ("none", "kill", "srun: error: a100-02: task 1: Killed", "rank 1 on a100-02: Killed"),
        ("torchrun", "kill", "exitcode  : -9 ", "rank 1 on a100-01: signal 9"),
    ],
    ids=["pmix, kill", "pmix, stall", "without MPI, kill", "torchrun, kill"],
)
def test_failing_rank_ends_the_job(
    cluster: Cluster, tmp_path: Path, watched: dict[str, str], launcher: str, fault: str, once: str, first: str
) -> None:
    job = cluster.submit(*by_launcher(launcher, tmp_path, f"{SMALL} 4", watched | faults(fault)))
    ended = cluster.ended(job)
    assert seconds_since_failure(watched) < 30, ended
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended
    assert ended.err.count(once) == 1, ended
    assert not re.findall(FAILED, ended.err), ended
    assert first_failure(ended.err.splitlines()).startswith(first), ended


@pytest.mark.parametrize(
    ("by", "fault", "once", "first"),
    [
        ("--mpi", "kill", "on node a100-02 exited on signal 9", "rank 1 on a100-02: signal 9 (Killed)"),
        ("--gloo", "kill", "Process 1 exit with status code", "rank 1 on a100-02: exit code"),
        ("--gloo", "import", IMPORT, f"rank 1 on a100-02: {IMPORT}"),
    ],
)
def test_failing_rank_ends_horovodrun(
    cluster: Cluster, tmp_path: Path, watched: dict[str, str], by: str, fault: str, once: str, first: str
) -> None:
    launch = f"horovodrun -np 2 -H a100-01:1,a100-02:1 {by} --network-interfaces eth0"
    command = f"{launch} python -m hvd_bert.train {SMALL} 4 --output_dir out"
    outcome = cluster.on("a100-01", command, tmp_path, watched | faults(fault))
    assert seconds_since_failure(watched) < 30, outcome
    assert not outcome.hung and outcome.status != 0, outcome
    assert outcome.output.count(once) == 1, outcome
    assert len(re.findall(FAILED, outcome.output)) == (fault == "import"), outcome
    assert first_failure(outcome.output.splitlines(), HOSTS).startswith(first), outcome


def test_srun_without_pmi_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    command = f"srun --nodes=2 --ntasks-per-node=1 --mpi=none python -m hvd_bert.train {SMALL} 4 --output_dir out"
    outcome = cluster.on("login", command, tmp_path).expect(2)
    assert outcome.output.count("hvd_bert: srun started 2 processes without PMIx") == 1, outcome
    assert "srun --mpi=pmix" in outcome.output, outcome
    assert not (tmp_path / "out").exists()


def test_job_of_several_tasks_without_srun_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    train = f"python -m hvd_bert.train {SMALL} 2"
    for ntasks, strategy in (("--ntasks=2", "horovod"), ("--nodes=2", "ddp")):
        job = cluster.submit([ntasks, "--wrap", f"{train} --strategy {strategy} --output_dir out"], tmp_path)
        ended = cluster.ended(job).expect(2)
        assert ended.out.count("hvd_bert: ") == 1 and "--strategy none" in ended.out, ended
        assert not (tmp_path / "out").exists()
    job = cluster.submit(["--ntasks=2", "--wrap", f"{train} --strategy none --output_dir out"], tmp_path)
    cluster.ended(job).expect(0)
    assert results(tmp_path / "out")["world_size"] == 1


def test_launcher_in_each_task_of_srun_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    command = "srun --nodes=1 --ntasks=2 --mpi=none horovodrun -np 2 python -m hvd_bert.train"
    cold = {"HVD_BERT_TEST_COLD": "1"}  # processes of the fork server are not children of mpirun
    outcome = cluster.on("login", f"{command} {SMALL} 4 --output_dir out", tmp_path, cold).expect(2)
    assert outcome.output.count("hvd_bert: Each of srun's 2 tasks has started mpirun with 2 ranks") == 1, outcome
    assert not (tmp_path / "out").exists()
    doctor = "srun --nodes=1 --ntasks=2 --mpi=none hvd-bert doctor --hosts a100-01:1"
    outcome = cluster.on("login", doctor, tmp_path).expect(2)
    assert outcome.output.count("--hosts: start the check once") == 1, outcome


def test_host_name_that_resolves_to_loopback_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"  # as written by Debian's installer
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 a100-01\n10.77.0.12 a100-02\n")
    # Name the first host by its address: horovodrun would take 127.0.1.1 for another host, and use ssh.
    command = "horovodrun --gloo -np 2 -H 10.77.0.11:1,a100-02:1 --network-interfaces eth0 python -m hvd_bert.train"
    inside = ["unshare", "--mount", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec {command} {SMALL} 2"]
    outcome = cluster.on("a100-01", inside, tmp_path, {"HVD_BERT_TEST_COLD": "1"}).expect(1)
    assert outcome.output.count("hvd_bert: ") == outcome.output.count("`10.77.0.11 a100-01`") == 1, outcome
