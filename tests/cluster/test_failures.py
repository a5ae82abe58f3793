"""Failures on two hosts: the job ends soon, with a status, and reports the cause and the host once."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from commands import said
from harness import HOROVODRUN_SCRIPT, JOB_SCRIPT, SMALL, Cluster, results
from launch import Outcome

pytestmark = pytest.mark.cluster

RAISED = "rank 1 on a100-02 failed:"
FAILED = r"rank \d on \S+ failed:"  # of any rank; Open MPI prints "readv failed:", too
IMPORT = "ModuleNotFoundError: No module named 'hvd_bert.evaluation.evaluator'"
STALL_TIMES = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4"}
WAITED = "rank 0 on a100-01 has waited 4 s for rank 1 on a100-02 to reach "


def seconds_since_failure(env: dict[str, str]) -> float:
    (failed,) = [line for line in Path(env["WATCHED_LOG"]).read_text().splitlines() if line.startswith("failed")]
    return time.time() - float(failed.split()[1])


def faults(fault: str) -> dict[str, str]:
    return {"WATCHED_FAULT": fault} | (STALL_TIMES if fault == "stall" else {})


@pytest.mark.parametrize(
    ("fault", "once", "first"),
    [("kill", "srun: error: a100-02: task 1: Killed", "rank 1 on a100-02: Killed"), ("stall", WAITED, WAITED)],
    ids=["kill", "stall"],
)
def test_failing_rank_ends_the_job(
    cluster: Cluster, tmp_path: Path, watched: dict[str, str], fault: str, once: str, first: str
) -> None:
    job = cluster.submit(f"--ntasks-per-node=1 {JOB_SCRIPT} {SMALL} 4", tmp_path, watched | faults(fault))
    ended = cluster.ended(job)
    assert seconds_since_failure(watched) < 30, ended
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended
    assert ended.err.count(once) == 1, ended
    assert not re.findall(FAILED, ended.err), ended
    last = ended.out.splitlines()[-1]
    if fault == "stall":  # and the names of parameters
        last = last[: last.rindex(" to reach ") + len(" to reach ")]
    assert last == f"hvd.slurm: first failure: {first}", ended


@pytest.mark.parametrize(
    ("by", "fault", "once", "first"),
    [
        ("--mpi", "kill", "on node a100-02 exited on signal 9", "rank 1 on a100-02: signal 9 (Killed)"),
        ("--mpi", "raise", RAISED, "rank 1 on a100-02: RuntimeError: broken on purpose"),
        ("--gloo", "kill", "Process 1 exit with status code", "rank 1 on a100-02: exit code"),
        ("--gloo", "import", IMPORT, f"rank 1 on a100-02: {IMPORT}"),
    ],
)
def test_failing_rank_ends_horovodrun(
    cluster: Cluster, tmp_path: Path, watched: dict[str, str], by: str, fault: str, once: str, first: str
) -> None:
    hosts = f"-H a100-01:1,a100-02:1 {by} --interface 10.77.0.0/24"
    command = f"bash {HOROVODRUN_SCRIPT} {hosts} -- {SMALL} 4 --output_dir out"
    outcome = cluster.on("a100-01", command, tmp_path, watched | faults(fault))
    assert seconds_since_failure(watched) < 30, outcome
    assert not outcome.hung and outcome.status != 0, outcome
    *text, last = said(outcome).splitlines()
    assert "\n".join(text).count(once) == 1, outcome
    assert len(re.findall(FAILED, "\n".join(text))) == (fault in ("raise", "import")), outcome
    assert last.startswith(f"horovodrun.sh: first failure: {first}"), outcome


def test_srun_without_pmi_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    command = f"srun --nodes=2 --ntasks-per-node=1 --mpi=none python -m hvd_bert.train {SMALL} 4 --output_dir out"
    outcome = cluster.on("login", command, tmp_path).expect(2)
    assert outcome.output.count("hvd_bert: srun started 2 processes without PMIx") == 1, outcome
    assert "srun --mpi=pmix" in outcome.output, outcome
    assert not (tmp_path / "out").exists()


def test_job_of_several_tasks_without_srun_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    train = f"python -m hvd_bert.train {SMALL} 2"
    for ntasks in ("--ntasks=2", "--nodes=2"):
        for strategy in ("horovod", "ddp"):
            job = cluster.submit([ntasks, "--wrap", f"{train} --strategy {strategy} --output_dir out"], tmp_path)
            ended = cluster.ended(job).expect(2)
            assert ended.out.count("hvd_bert: ") == 1 and "--strategy none" in ended.out, ended
            assert not (tmp_path / "out").exists()
    job = cluster.submit(["--ntasks=2", "--wrap", f"{train} --strategy none --output_dir out"], tmp_path)
    cluster.ended(job).expect(0)
    assert results(tmp_path / "out")["world_size"] == 1


def test_launcher_in_each_task_of_srun_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    command = "srun --nodes=1 --ntasks=2 --mpi=none horovodrun -np 2 python -m hvd_bert.train"
    cold = {"HVD_BERT_TEST_COLD": "1"}  # the fork server's processes are not children of mpirun
    outcome = cluster.on("login", f"{command} {SMALL} 4 --output_dir out", tmp_path, cold).expect(2)
    assert outcome.output.count("hvd_bert: Each of srun's 2 tasks has started mpirun with 2 ranks") == 1, outcome
    assert not (tmp_path / "out").exists()
    script = f"srun --nodes=1 --ntasks=2 --mpi=none bash {HOROVODRUN_SCRIPT} -H a100-01:1"
    outcome = cluster.on("login", script, tmp_path).expect(2)
    assert outcome.output.count("horovodrun.sh: started by each of srun's 2 tasks") == 1, outcome


def test_own_name_that_other_hosts_cannot_use(cluster: Cluster, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"  # as Debian's installer writes it
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 a100-01\n10.77.0.12 a100-02\n")
    # By its address, since horovodrun takes 127.0.1.1 for another host, and would use ssh.
    command = "horovodrun --gloo -np 2 -H 10.77.0.11:1,a100-02:1 --network-interfaces eth0 python -m hvd_bert.train"
    inside = ["unshare", "--mount", "sh", "-c", f"mount --bind {hosts} /etc/hosts && exec {command} {SMALL} 2"]
    outcome = cluster.on("a100-01", inside, tmp_path, {"HVD_BERT_TEST_COLD": "1"}).expect(1)
    assert outcome.output.count("hvd_bert: ") == outcome.output.count("`10.77.0.11 a100-01`") == 1, outcome


# --- scripts/horovodrun.sh checks the hosts first --------------------------------------------------


def check(cluster: Cluster, arguments: str, cwd: Path, host: str = "login") -> Outcome:
    outcome = cluster.on(host, f"bash {HOROVODRUN_SCRIPT} {arguments}", cwd, timeout=60)
    assert not outcome.hung, outcome
    return outcome


def test_hosts_that_pass(cluster: Cluster, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two nodes\na100-01 slots=2\n\na100-02:2\n")
    check(cluster, f"--hostfile {hostfile} --interface eth0 --check-only", tmp_path).expect(0)
    hosts = "-H a100-01:2,a100-02:2 --interface 10.77.0.0/16"
    check(cluster, f"{hosts} --gloo --check-only", tmp_path, "a100-01").expect(0)


def test_host_with_another_key_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with (cluster.state / "etc" / "hosts").open("a") as hosts:
        hosts.write("10.77.0.12 a100-03\n")
    known = cluster.state / "home" / ".ssh" / "known_hosts"
    (key,) = [line.split(" ", 1)[1] for line in known.read_text().splitlines() if line.startswith("a100-01,")]
    with known.open("a") as lines:
        lines.write(f"a100-03 {key}\n")
    outcome = check(cluster, "-H a100-01:2,a100-03:2 --check-only", tmp_path).expect(2)
    assert "a100-03: ssh failed: Host key verification failed." in outcome.output, outcome
    assert "a100-01: " not in outcome.output, outcome


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-H a100-01:2,a100-09:2", ["a100-09: this name does not resolve"]),
        (
            "-H a100-01:2,a100-02:2 -i /etc/hostname",
            ["a100-01: ssh failed", "a100-02: ssh failed", "without a password"],
        ),
        (
            "-H a100-01:2,a100-02:2 --interface 10.99.0.0/16",
            ["a100-02: no interface in this subnet; available: lo 127.0.0.1", "eth0 10.77.0.12"],
        ),
        ("-H a100-01:2,a100-02:2 --interface eth0 --gloo", ["login, this host, has no interface eth0"]),
        ("-H a100-01:2,a100-02:2 -np 5", ["-np 5", "4 slots"]),
        ("-H a100-01:two", ["'a100-01:two' is not HOST:SLOTS"]),
        ("-H a100-01:2 --config sample", ["unknown argument --config", "--"]),
    ],
    ids=["name", "password", "subnet", "gloo", "ranks", "slots", "argument"],
)
def test_failing_host_is_named(cluster: Cluster, tmp_path: Path, arguments: str, words: list[str]) -> None:
    outcome = check(cluster, arguments, tmp_path).expect(2)
    assert [word for word in words if word not in outcome.output] == [], outcome


def test_arguments_after_the_dashes_go_to_the_trainer(cluster: Cluster, tmp_path: Path) -> None:
    command = f"bash {HOROVODRUN_SCRIPT} -H a100-01:1,a100-02:1 -- --output_dir 'my runs' --learning_rat 1"
    outcome = cluster.on("login", command, tmp_path)
    assert outcome.status != 0, outcome
    assert outcome.output.count("hvd_bert: Unknown argument --learning_rat: did you mean --learning_rate") == 1, outcome
    last = "horovodrun.sh: first failure: Unknown argument --learning_rat: did you mean --learning_rate?"
    assert outcome.output.splitlines()[-1] == last, outcome
