"""Time limits, requeues, lost and added hosts: training keeps its progress, on two hosts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import resuming
import stopping_at
from harness import FOLDER, HOSTS, JOB_SCRIPT, SMALL, Cluster
from launch import REPOSITORY, programs, served

pytestmark = pytest.mark.cluster
Pretended = Callable[[str], dict[str, str]]

DROPOUT = f"{SMALL.replace('--dropout 0', '--dropout 0.1')} 12 --per_device_train_batch_size 8 --save_steps 5"


def start_again(cluster: Cluster, job: str, folder: Path) -> None:
    """Wait for the job to requeue itself, and let it start."""
    cluster.wait(job, "PENDING", restarts=1)
    # Slurm delays a requeued job by two minutes, because its nodes refuse credentials that are not newer than the end
    # of the first attempt, in whole seconds ("Job credential revoked"). Three seconds are enough.
    cluster.on("login", ["scontrol", "update", f"jobid={job}", "StartTime=now+3"], folder, timeout=60).expect(0)


@pytest.mark.campaign  # Slurm checks time limits twice a minute
def test_time_limit_saves_requeues_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    """One `sbatch` trains to the end, bit-identical, with a real time limit and Slurm's signal before it."""
    python = tmp_path / "waiting" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{served(sys.executable)}" "{FOLDER / "altered.py"}" "$@"\n')
    python.chmod(0o755)
    waiting = {"HVD_BERT_VENV": str(python.parents[1]), "WAITING_STEP": "8"}
    waiting |= {"PATH": f"{python.parent}:{programs()}:{os.environ['PATH']}"}
    # Slurm checks time limits twice a minute, and sends the signal up to half a minute early: here after 60 to 90 s,
    # long after the training has started, even on a slow machine.
    options = "--nodes=2 --ntasks-per-node=1 --time=3 --signal=B:USR1@90"
    flags = f"{DROPOUT} --output_dir limited --overwrite_output_dir"
    job = cluster.submit(f"{options} {JOB_SCRIPT} {flags}", tmp_path, waiting)
    start_again(cluster, job, tmp_path)
    ended = cluster.ended(job).expect(0)
    first, second = ended.out.split("attempt 2", 1)
    assert first.count("warning: the time limit is near (signal USR1): saving") == 1, ended
    assert "requeueing: the next attempt resumes from limited/checkpoint-8" in first, ended
    assert ended.err.count("Stopped after step 8 by SIGUSR1") == 1, ended
    assert "Resuming from step 8: limited/checkpoint-8" in second, ended
    assert "--overwrite_output_dir=false --resume_from_checkpoint=latest" in second, ended

    whole = cluster.submit(f"--nodes=2 --ntasks-per-node=1 {JOB_SCRIPT} {DROPOUT} --output_dir whole", tmp_path)
    cluster.ended(whole).expect(0)
    assert resuming.differences(tmp_path / "whole", tmp_path / "limited") == []


# Each attempt reports through a pipe that it runs, and waits for the signal. Neither gets beyond checkpoint-1.
STUCK = r"""
if [ "$SLURM_PROCID" = 0 ]; then
  mkdir -p out
  [ -e out/latest ] || echo checkpoint-1 >out/latest
  echo >"$STARTED"
fi
exec tail -f /dev/null
"""


def test_attempt_without_progress_is_not_requeued(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    job = cluster.submit(f"{JOB_SCRIPT} --output_dir out", tmp_path, pretended(STUCK) | {"STARTED": str(started)})
    for attempt, name in ((1, "USR2"), (2, "TERM")):  # some sites send only one of them
        cluster.on("login", ["cat", str(started)], tmp_path, timeout=100).expect(0)
        cluster.on("login", ["scancel", "--batch", f"--signal={name}", job], tmp_path, timeout=60).expect(0)
        if attempt == 1:
            start_again(cluster, job, tmp_path)
    ended = cluster.ended(job)
    assert ended.state == "FAILED" and ended.status != 0, ended
    assert ended.out.count("requeueing: the next attempt resumes from out/checkpoint-1") == 1, ended
    assert "not requeued: this attempt wrote no checkpoint" in ended.out, ended


def elastic(hosts: str, size: int, steps: int, stop: str) -> list[str]:
    """horovodrun as in docs/guides/resume-and-reliability.md, with the trainer in tests/parallel/stopping_at.py."""
    words = ["horovodrun", "-np", str(size), "--min-np", "2", "--max-np", "4", "--network-interfaces", "eth0"]
    words += ["--host-discovery-script", hosts, "python", stopping_at.__file__, *stop.split(), *SMALL.split()]
    return [*words, *f"{steps} --elastic --save_steps 0 --output_dir out --per_device_train_batch_size 4".split()]


def test_training_continues_without_a_lost_host(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a100-01:2\na100-02:2\n")
    discover = str(REPOSITORY / "scripts" / "discover_hosts.sh")
    # Ranks 2 and 3 are on one host, horovodrun's or the other. Both die at the start of step 11.
    command = elastic(discover, 4, 16, "11 2,3 SIGKILL start")
    outcome = cluster.on("a100-01", command, tmp_path).expect(0)
    result = json.loads((tmp_path / "out" / "train_results.json").read_text())
    assert (result["world_size"], len(result["hosts"]), result["global_batch"]) == (2, 1, 16), outcome
    assert re.findall(r"Resuming after step (\d+)", outcome.output) == ["10"], outcome
    lost, joined = (float((tmp_path / name).read_text()) for name in ("signalled", "resumed"))
    assert joined - lost < 60, outcome
    # The windows that were trained: by four ranks up to step 10, then by two. An epoch has 4 steps of 16.
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
