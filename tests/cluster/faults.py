"""Faults on a cluster, as context managers: each causes a fault at the start, and repairs it at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from disturbed import Disturbed
from harness import FOLDER
from shaping import shaped

Fault = Callable[[Disturbed], AbstractContextManager[object]]
SECOND = "a100-02"  # the host of rank 1
MEMORY = "/sys/fs/cgroup/memory"


@contextmanager
def link_down(run: Disturbed) -> Iterator[None]:
    """Block the second host's port at the switch. The host still sees a carrier."""
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
    """Raise the time limit of steps, for a slow link."""
    run.env["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "300"


def cold(run: Disturbed) -> None:
    """Start ranks below Slurm's tasks, which Slurm kills, and not below the tests' fork server."""
    run.env["HVD_BERT_TEST_COLD"] = "1"


@contextmanager
def stopped(run: Disturbed, rank: int = 1) -> Iterator[None]:
    """Stop a rank's process by SIGSTOP."""
    run.on(SECOND, "kill", "-STOP", str(run.pid(rank)))
    try:
        yield
    finally:
        run.cluster.on(SECOND, f"kill -CONT {run.pid(rank)}", run.folder, timeout=60)  # unless it has been ended


@contextmanager
def out_of_memory(run: Disturbed) -> Iterator[None]:
    """Let the kernel kill rank 1 because a program on its host allocates too much memory."""
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
