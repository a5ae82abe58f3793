"""Faults on a cluster: context managers that cause a fault on entry and repair it on exit."""

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
    # The login host is also the switch. It must not answer ARP requests at this port.
    run.on("login", "ip", "link", "set", "veth02", "nomaster", "arp", "off")
    try:
        yield
    finally:
        run.on("login", "ip", "link", "set", "veth02", "master", "cluster0", "arp", "on")


def slow_link(run: Disturbed, latency_ms: float = 0.0, loss: float = 0.0) -> AbstractContextManager[None]:
    return shaped(run.cluster.state, 10.0, latency_ms, loss)


def patient(run: Disturbed) -> None:
    """Raise the stall shutdown time for a slow link."""
    run.env["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "300"


def cold(run: Disturbed) -> None:
    """Do not use the tests' fork server. Ranks are then descendants of Slurm's tasks, so that Slurm can kill them."""
    run.env["HVD_BERT_TEST_COLD"] = "1"


@contextmanager
def stopped(run: Disturbed) -> Iterator[None]:
    """Stop the process of rank 1 by SIGSTOP."""
    run.on(SECOND, "kill", "-STOP", str(run.pid(1)))
    try:
        yield
    finally:
        # Ignore the status, because the process may have ended.
        run.cluster.on(SECOND, f"kill -CONT {run.pid(1)}", run.folder, timeout=60)


@contextmanager
def out_of_memory(run: Disturbed) -> Iterator[None]:
    """Make the kernel kill rank 1: another program in its memory cgroup allocates too much."""
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
