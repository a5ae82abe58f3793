"""What goes wrong on two hosts: the job ends soon, with a status, and says once what it was and where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from commands import said
from harness import HOROVODRUN_SCRIPT, JOB_SCRIPT, SMALL, Cluster
from launch import Outcome

pytestmark = pytest.mark.cluster

# What the log must say of the first failure, once.
RAISED = "rank 1 on a100-02 failed:"
IMPORT = "ModuleNotFoundError: No module named 'hvd_bert.evaluation'"


def seconds_since_failure(env: dict[str, str]) -> float:
    (failed,) = [line for line in Path(env["WATCHED_LOG"]).read_text().splitlines() if line.startswith("failed")]
    return time.time() - float(failed.split()[1])


@pytest.mark.parametrize(
    ("fault", "once"),
    [
        ("kill", ["srun: error: a100-02: task 1: Killed"]),
        ("raise", [RAISED, "RuntimeError: broken on purpose"]),
        ("import", [IMPORT, "srun: error: a100-02: task 1: Exited with exit code 1"]),
    ],
    ids=["kill", "raise", "import"],
)
def test_rank_that_fails_ends_the_job(
    cluster: Cluster, tmp_path: Path, watched: dict[str, str], fault: str, once: list[str]
) -> None:
    job = cluster.submit(f"--ntasks-per-node=1 {JOB_SCRIPT} {SMALL} 4", tmp_path, watched | {"WATCHED_FAULT": fault})
    ended = cluster.ended(job)
    assert seconds_since_failure(watched) < 30, ended
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended
    assert [ended.err.count(words) for words in once] == [1] * len(once), ended
    last = ended.out.splitlines()[-1]
    assert last.startswith("hvd.slurm: first failure: ") and "a100-02" in last, ended
    assert all(words.removeprefix("srun: error: ") in last for words in once), ended


@pytest.mark.parametrize(
    ("fault", "once"),
    [("kill", ["process rank 1 with PID", "on node a100-02 exited on signal 9"]), ("raise", [RAISED])],
    ids=["kill", "raise"],
)
def test_rank_that_fails_ends_horovodrun(
    cluster: Cluster, tmp_path: Path, watched: dict[str, str], fault: str, once: list[str]
) -> None:
    command = f"horovodrun -np 2 -H a100-01:1,a100-02:1 python -m hvd_bert.train {SMALL} 4 --output_dir out"
    outcome = cluster.on("login", command, tmp_path, watched | {"WATCHED_FAULT": fault})
    assert seconds_since_failure(watched) < 30, outcome
    assert not outcome.hung and outcome.status != 0, outcome
    assert [said(outcome).count(words) for words in once] == [1] * len(once), outcome


def test_worlds_of_one_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    command = f"srun --nodes=2 --ntasks-per-node=1 --mpi=none python -m hvd_bert.train {SMALL} 4 --output_dir out"
    outcome = cluster.on("login", command, tmp_path).expect(2)
    assert outcome.output.count("hvd_bert: srun started 2 processes without PMIx") == 1, outcome
    assert "srun --mpi=pmix" in outcome.output, outcome
    assert not (tmp_path / "out").exists()


def test_output_dir_that_rank_0_cannot_write(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(f"--ntasks-per-node=1 {JOB_SCRIPT} {SMALL} 4 --output_dir /proc/hvd_bert", tmp_path)
    ended = cluster.ended(job).expect(2)
    refused = "hvd_bert: rank 0 on a100-01: --output_dir /proc/hvd_bert cannot be written"
    assert ended.err.count(refused) == 1, ended
    assert "Training:" not in ended.out, ended


# --- scripts/horovodrun.sh looks at the hosts first ------------------------------------------------


def look(cluster: Cluster, arguments: str, cwd: Path, host: str = "login") -> Outcome:
    outcome = cluster.on(host, f"bash {HOROVODRUN_SCRIPT} {arguments}", cwd, timeout=60)
    assert not outcome.hung, outcome
    return outcome


def test_hosts_that_will_do(cluster: Cluster, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two nodes\na100-01 slots=2\n\na100-02:2\n")
    look(cluster, f"--hostfile {hostfile} --interface eth0 --check-only", tmp_path).expect(0)
    look(cluster, "-H a100-01:2,a100-02:2 --interface eth0 --gloo --check-only", tmp_path, "a100-01").expect(0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-H a100-01:2,a100-09:2", ["a100-09: this name does not resolve"]),
        (
            "-H a100-01:2,a100-02:2 -i /etc/hostname",
            ["a100-01: ssh failed", "a100-02: ssh failed", "without a password"],
        ),
        ("-H a100-01:2,a100-02:2 -p 2222", ["a100-01: ssh failed", "Connection refused"]),
        ("-H a100-01:2,a100-02:2 --interface ib7", ["a100-01: no interface ib7", "eth0"]),
        ("-H a100-01:2,a100-02:2 --interface eth0 --gloo", ["login, this host, has no interface eth0"]),
        ("-H a100-01:2,a100-02:2 -np 5", ["-np 5", "4 slots"]),
        ("-H a100-01:two", ["'a100-01:two' is not HOST:SLOTS"]),
        ("--hostfile nowhere", ["--hostfile nowhere: no such file"]),
        ("-H a100-01:2 --config sample", ["unknown argument --config", "--"]),
    ],
    ids=["name", "password", "port", "interface", "gloo", "ranks", "slots", "hostfile", "argument"],
)
def test_host_that_will_not_do_is_named(cluster: Cluster, tmp_path: Path, arguments: str, words: list[str]) -> None:
    outcome = look(cluster, arguments, tmp_path).expect(2)
    assert [word for word in words if word not in outcome.output] == [], outcome


def test_what_follows_the_dashes_goes_to_the_trainer(cluster: Cluster, tmp_path: Path) -> None:
    command = f"bash {HOROVODRUN_SCRIPT} -H a100-01:1,a100-02:1 -- --output_dir 'my runs' --learning_rat 1"
    outcome = cluster.on("login", command, tmp_path)
    assert outcome.status != 0, outcome
    assert said(outcome).count("did you mean --learning_rate") == 1, outcome
