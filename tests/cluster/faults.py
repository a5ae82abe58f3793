"""What goes wrong on a cluster, as context managers: each does its damage at the start, and repairs it at the end."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from disturbed import Disturbed
from harness import FOLDER
from shaping import shaped

Fault = Callable[[Disturbed], AbstractContextManager[object]]
SECOND = "a100-02"  # the host of rank 1
MEMORY = "/sys/fs/cgroup/memory"


@contextmanager
def link_down(run: Disturbed) -> Iterator[None]:
    """The second host's port at the switch passes nothing. The host itself still sees a carrier."""
    # The login host, which is the switch, too, must not answer through the port in place of the switch.
    run.on("login", "ip", "link", "set", "veth02", "nomaster", "arp", "off")
    try:
        yield
    finally:
        run.on("login", "ip", "link", "set", "veth02", "master", "cluster0", "arp", "on")


def slow_link(
    run: Disturbed, gbps: float = 10.0, latency_ms: float = 0.0, loss: float = 0.0
) -> AbstractContextManager[None]:
    return shaped(run.cluster.state, gbps, latency_ms, loss)


def patient(run: Disturbed) -> None:
    """Steps may take longer on a slow link than the campaign's limit."""
    run.env["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "300"


def cold(run: Disturbed) -> None:
    """Ranks are descendants of Slurm's tasks, which Slurm kills, and not of the tests' fork server."""
    run.env["HVD_BERT_TEST_COLD"] = "1"


@contextmanager
def stopped(run: Disturbed, rank: int = 1) -> Iterator[None]:
    """A rank's process does not run."""
    run.on(SECOND, "kill", "-STOP", str(run.pid(rank)))
    try:
        yield
    finally:
        run.cluster.on(SECOND, f"kill -CONT {run.pid(rank)}", run.folder, timeout=60)  # unless it has been ended


@contextmanager
def out_of_memory(run: Disturbed) -> Iterator[None]:
    """The kernel ends rank 1, since a program on its host takes more memory than there is."""
    group = f"{MEMORY}/hvd_bert_{run.folder.name}"
    run.on(SECOND, "mkdir", group)
    try:
        take = (
            f"echo 64M >{group}/memory.limit_in_bytes; echo {run.pid(1)} >{group}/cgroup.procs;"
            f" echo 1000 >/proc/{run.pid(1)}/oom_score_adj; echo $$ >{group}/cgroup.procs;"
            " exec python3 -c 'bytearray(200 << 20)' || true"
        )
        subprocess.run(["bash", FOLDER / "on.sh", SECOND, "sh", "-c", take], check=False, env=run.hosts_environ)
        yield
    finally:
        run.on(SECOND, "rmdir", group)


@contextmanager
def folder_mode(run: Disturbed, mode: str) -> Iterator[None]:
    """The shared folder (shared_folder.py) fails in this way."""
    (run.folder / "mode").write_text(mode)
    try:
        yield
    finally:
        (run.folder / "mode").write_text("works")


@contextmanager
def slow_and_killed(run: Disturbed) -> Iterator[None]:
    """The shared folder is slow, and before that ends the kernel kills rank 1."""
    with folder_mode(run, "slow"):
        yield
        run.on(SECOND, "kill", "-KILL", str(run.pid(1)))


@contextmanager
def clock_jumps(run: Disturbed, by: str) -> Iterator[None]:
    """The clock of a host, prepared with `faked_clock`, jumps."""
    (run.folder / "clock").write_text(by)
    yield


def faked_clock(run: Disturbed, host: str) -> None:
    """Prepare a host whose clock can jump, for its rank and, with torchrun, for the agent that starts the rank."""
    library, clock, start = (run.folder / name for name in ("jumping_clock.so", "clock", "with_clock"))
    compiler = shutil.which("cc") or pytest.skip("the jump of a clock needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, FOLDER / "jumping_clock.c"], check=True, timeout=60)
    clock.write_text("0")
    preload = f"export LD_PRELOAD={library} JUMPING_CLOCK={clock}"
    start.write_text(f'#!/bin/sh\n[ "$(hostname)" != {host} ] || {preload}\nexec "$@"\n')
    start.chmod(0o755)
    run.launch = re.sub(r" (python|torchrun)\b", rf" {start} \1", run.launch)


@contextmanager
def no_sshd(run: Disturbed) -> Iterator[None]:
    """The second host's sshd is gone; its open sessions are not."""
    log = run.cluster.state / "log" / f"sshd-{SECOND}.log"
    key = run.cluster.state / "nodes" / SECOND / "host_key"
    (listener,) = run.on(SECOND, "pgrep", "-f", f"sshd: .*-h {key}.*listener").split()
    run.on(SECOND, "kill", listener)
    try:
        yield
    finally:
        run.on(SECOND, "/usr/sbin/sshd", "-f", run.cluster.state / "sshd_config", "-h", key, "-E", log)


def start_daemon(run: Disturbed, host: str, *words: str) -> None:
    """Start a daemon of the cluster that outlives this test."""
    command = ["bash", str(FOLDER / "on.sh"), host, "setsid", *words]
    null = subprocess.DEVNULL
    subprocess.Popen(command, env=run.hosts_environ, stdin=null, stdout=null, stderr=null, start_new_session=True)


@contextmanager
def slurmd_restarted(run: Disturbed) -> Iterator[None]:
    """The second node's slurmd ends, and starts again. The job's own slurmstepd keeps running. A later job starts."""
    slurmd = ("pgrep", "-f", f"slurmd -D -N {SECOND}")
    (killed,) = run.on(SECOND, *slurmd).split()
    run.on(SECOND, "kill", "-KILL", killed)
    start_daemon(run, SECOND, "slurmd", "-D", "-N", SECOND)
    yield
    assert run.on(SECOND, *slurmd).split() not in ([], [killed])
    run.on("login", "srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=none", "true")


@contextmanager
def munge_down(run: Disturbed) -> Iterator[None]:
    """No host can make or check Slurm's credentials."""
    (munged,) = run.on("login", "pgrep", "-x", "munged").split()
    run.on("login", "kill", munged)
    try:
        yield
    finally:
        log = "--log-file=/run/munge/munged.log"
        start_daemon(run, "login", "munged", "--foreground", "--seed-file=/run/munge/seed", log)


@contextmanager
def drained(run: Disturbed) -> Iterator[None]:
    """The administrator drains the second node."""
    run.on("login", "scontrol", "update", f"nodename={SECOND}", "state=drain", "reason=test")
    try:
        yield
    finally:
        run.on("login", "scontrol", "update", f"nodename={SECOND}", "state=resume")


@contextmanager
def shared_folder(run: Disturbed) -> Iterator[None]:
    """Around the run: its output folder is on a file system that can fail, on rank 0's host."""
    pytest.importorskip("mfusepy", reason="a folder that fails needs libfuse (apt-get install libfuse2) and mfusepy")
    below, where, mode = (run.folder / name for name in ("below", "shared", "mode"))
    below.mkdir()
    where.mkdir()
    mode.write_text("works")
    with run.background("a100-01", sys.executable, str(FOLDER / "shared_folder.py"), below, where, mode):
        try:
            yield
        finally:
            run.on("a100-01", "umount", "-l", where)
