"""Training on two hosts continues after time limits and requeues, and when hosts are lost or added."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import resuming
import stopping_at
from harness import FINAL, HOSTS, JOB_SCRIPT, SMALL, TIMEOUT_S, Cluster, results
from launch import REPOSITORY
from test_job_script import by_launcher, script_by

pytestmark = pytest.mark.cluster

DROPOUT = f"{SMALL.replace('--dropout 0', '--dropout 0.1')} 12 --per_device_train_batch_size 8 --save_steps 5"


def start_again(cluster: Cluster, job: str, folder: Path) -> None:
    """Wait until the job has requeued itself and its first attempt has ended, and let Slurm start it after 3 s."""
    own_id = cluster.wait(job, "PENDING", restarts=1)["JobId"]  # without the array's task number
    # A node that was down may still run the first attempt. Slurm would take its end for that of the second attempt.
    ended = cluster.on("login", ["pidwait", "--full", rf"slurmstepd: \[{own_id}\."], folder)
    assert ended.status in (0, 1), ended  # 1: it had ended before
    # By default, Slurm waits for two minutes: nodes refuse a credential that is not newer, in whole seconds, than the
    # end of the first attempt ("Job credential revoked"). Three seconds are enough.
    cluster.on("login", ["scontrol", "update", f"jobid={job}", "StartTime=now+3"], folder, timeout=60).expect(0)


def wait_for(cluster: Cluster, job: str, text: str, log: Path | None = None, timeout: float = TIMEOUT_S) -> None:
    """Wait until the file `log` (default: the job's output file) contains `text`.

    Fails the test if the job ends before, or after `timeout` s.
    """
    log, deadline = log or Path(cluster.show(job)["StdOut"]), time.monotonic() + timeout
    while not (log.exists() and text in log.read_text()):
        if time.monotonic() > deadline or cluster.show(job)["JobState"] in FINAL:
            pytest.fail(f"no {text!r} in\n{cluster.ended(job)}", pytrace=False)
        time.sleep(0.2)  # polls until the deadline


def cancel(cluster: Cluster, *words: str) -> None:
    cluster.on("login", ["scancel", *words], cluster.state, timeout=60).expect(0)


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    command = f"srun --nodes=2 --ntasks-per-node=1 --mpi=pmix python -m hvd_bert.train {DROPOUT} --output_dir out"
    cluster.on("login", command, folder).expect(0)
    return folder / "out"


@pytest.mark.parametrize(
    ("launcher", "time_limit"),
    [
        ("pmix", False),
        ("mpirun", False),
        pytest.param("pmix", True, marks=pytest.mark.campaign),  # Slurm checks time limits twice a minute
    ],
)
def test_stopped_job_requeues_and_resumes(
    cluster: Cluster, tmp_path: Path, altered: dict[str, str], whole: Path, launcher: str, time_limit: bool
) -> None:
    """One `sbatch` trains to the end, equal bit for bit to an uninterrupted run, even with --overwrite_output_dir."""
    script = script_by(launcher, tmp_path)
    # Slurm may send the signal half a minute early: here after 60 to 90 s, when the ranks are already waiting for it.
    limit = ["--time=3", "--signal=USR1@90"] if time_limit else []
    flags = f"{DROPOUT} --output_dir out --overwrite_output_dir".split()
    options = ["--nodes=2", "--ntasks-per-node=1", *limit, str(script), *flags]
    job = cluster.submit(options, tmp_path, altered | {"WAITING_STEP": "8"})
    if not time_limit:
        wait_for(cluster, job, "Training:")
        cancel(cluster, "--signal=USR1", *(["--batch"] if launcher == "mpirun" else []), job)
    start_again(cluster, job, tmp_path)
    ended = cluster.ended(job).expect(0)
    assert ended.out.count(f"Slurm job {job} has a time limit: requeueing it after step 8.\n") == 1, ended
    assert "The Slurm job was requeued: continuing its run in out." in ended.out, ended
    assert "Resuming from step 8: out/checkpoint-8" in ended.out, ended
    assert resuming.differences(whole, tmp_path / "out") == []


@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_job_without_mpi_requeues_and_resumes(
    cluster: Cluster, tmp_path: Path, altered: dict[str, str], launcher: str
) -> None:
    job = cluster.submit(
        *by_launcher(launcher, tmp_path, f"{DROPOUT} --output_dir out", altered | {"WAITING_STEP": "8"})
    )
    wait_for(cluster, job, "Training:")
    cancel(cluster, "--signal=USR1", job)
    start_again(cluster, job, tmp_path)
    ended = cluster.ended(job).expect(0)
    assert ended.out.count(f"Slurm job {job} has a time limit: requeueing it after step 8.\n") == 1, ended
    assert "Resuming from step 8: out/checkpoint-8" in ended.out, ended
    found = results(tmp_path / "out")
    assert (found["hosts"], found["world_size"]) == (HOSTS, 2 if launcher == "none" else 4)


def test_node_failure(cluster: Cluster, tmp_path: Path, altered: dict[str, str], whole: Path) -> None:
    options = f"--nodes=2 --ntasks-per-node=1 {JOB_SCRIPT} {DROPOUT} --output_dir out"
    job = cluster.submit(options, tmp_path, altered | {"WAITING_STEP": "8"})
    wait_for(cluster, job, "checkpoint-5", tmp_path / "out" / "latest")
    down = f"scontrol update nodename={HOSTS[1]} state=down reason=test"  # until the node's slurmd registers again
    cluster.on("login", down, tmp_path, timeout=60).expect(0)
    start_again(cluster, job, tmp_path)
    ended = cluster.ended(job).expect(0)
    # The ranks may save before they end.
    assert re.search(r"Resuming from step [58]: out/checkpoint-", ended.out), ended
    assert resuming.differences(whole, tmp_path / "out") == []


def test_array_of_jobs_by_a_users_script(cluster: Cluster, tmp_path: Path, altered: dict[str, str]) -> None:
    """A requeued task of an array resumes without --output_dir. The array's other task is cancelled."""
    train = f"srun --mpi=pmix python -m hvd_bert.train {SMALL} 4"
    options = ["--array=0-1", "--nodes=1", "--time=60", "--requeue", "--wrap", train]
    job = cluster.submit(options, tmp_path, altered | {"WAITING_STEP": "2"})
    for task in (f"{job}_0", f"{job}_1"):
        wait_for(cluster, task, "Training:")
    cancel(cluster, "--signal=USR1", f"{job}_1")
    start_again(cluster, f"{job}_1", tmp_path)
    facts = cluster.show(f"{job}_0")
    assert (facts["JobState"], facts["Restarts"]) == ("RUNNING", "0")
    cancel(cluster, f"{job}_0")
    cancelled, requeued = (cluster.ended(f"{job}_{task}") for task in (0, 1))
    assert (cancelled.state, requeued.expect(0).state) == ("CANCELLED", "COMPLETED")
    assert f"Slurm job {job}_0 is not requeued: Slurm is ending it" in cancelled.out, cancelled
    assert "Resuming from step 2: runs/" in requeued.out, requeued
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_refused_requeue(cluster: Cluster, tmp_path: Path, altered: dict[str, str]) -> None:
    options = f"--nodes=2 --ntasks-per-node=1 --no-requeue {JOB_SCRIPT} {SMALL} 4 --output_dir out"
    job = cluster.submit(options, tmp_path, altered | {"WAITING_STEP": "2"})
    wait_for(cluster, job, "Training:")
    cancel(cluster, "--signal=USR1", job)
    ended = cluster.ended(job)
    reason = "it does not allow it (sbatch --requeue does). Rerun the command to resume.\n"
    assert f"Slurm job {job} is not requeued: {reason}" in ended.err, ended
    assert ended.state == "FAILED" and (tmp_path / "out" / "checkpoint-2").exists(), ended


def test_attempt_without_progress_is_not_requeued(cluster: Cluster, tmp_path: Path, altered: dict[str, str]) -> None:
    options = f"--nodes=2 --ntasks-per-node=1 {JOB_SCRIPT} {SMALL} 2 --output_dir out"
    job = cluster.submit(options, tmp_path, altered | {"WAITING_STEP": "2", "SIGNALLED_AGAIN": "yes"})
    wait_for(cluster, job, "Training:")
    cancel(cluster, "--signal=USR1", job)
    start_again(cluster, job, tmp_path)
    ended = cluster.ended(job)
    assert ended.state == "FAILED" and ended.out.count("requeueing it after step 2.") == 1, ended
    assert "is not requeued: this attempt made no progress" in ended.err, ended


def elastic(hosts: str, size: int, steps: int, stop: str) -> list[str]:
    """Return the horovodrun command of docs/guides/resume-and-reliability.md, with stopping_at.py as trainer."""
    words = ["horovodrun", "-np", str(size), "--min-np", "2", "--max-np", "4", "--network-interfaces", "eth0"]
    words += ["--host-discovery-script", hosts, "python", stopping_at.__file__, *stop.split(), *SMALL.split()]
    return [*words, *f"{steps} --elastic --save_steps 0 --output_dir out --per_device_train_batch_size 4".split()]


def test_training_continues_without_a_lost_host(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a100-01:2\na100-02:2\n")
    discover = str(REPOSITORY / "scripts" / "discover_hosts.sh")
    # Ranks 2 and 3 are on the same host. Both die at the start of step 11.
    command = elastic(discover, 4, 16, "11 2,3 SIGKILL start")
    outcome = cluster.on("a100-01", command, tmp_path).expect(0)
    result = json.loads((tmp_path / "out" / "train_results.json").read_text())
    assert (result["world_size"], len(result["hosts"]), result["global_batch"]) == (2, 1, 16), outcome
    assert re.findall(r"Resuming after step (\d+)", outcome.output) == ["10"], outcome
    lost, joined = (float((tmp_path / name).read_text()) for name in ("signalled", "resumed"))
    assert joined - lost < 60, outcome
    # Windows trained by four ranks up to step 10, and by two ranks afterwards. An epoch has 4 steps of 16 windows.
    windows = stopping_at.taken(tmp_path, 10)
    for epoch in range(4):
        assert sum((windows[4 * epoch + i] for i in range(1, 5)), Counter()) == Counter(range(64)), outcome


def test_added_host_joins(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts.sh").write_text("echo a100-02:2\n[ ! -e signalled ] || echo a100-01:2\n")
    (tmp_path / "discover").write_text(f"#!/bin/sh\ncd {tmp_path} && . ./hosts.sh\n")
    (tmp_path / "discover").chmod(0o755)
    command = elastic(str(tmp_path / "discover"), 2, 12, "6 0 hosts start")
    outcome = cluster.on("a100-01", command, tmp_path).expect(0)
    assert "Resuming after step 6, kept by rank" in outcome.output, outcome
    result = json.loads((tmp_path / "out" / "train_results.json").read_text())
    assert (result["world_size"], sorted(result["hosts"]), result["global_batch"]) == (4, HOSTS, 8), outcome
