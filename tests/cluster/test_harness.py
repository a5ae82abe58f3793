"""The cluster of these tests starts next to another one, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import pytest
from harness import Cluster, script
from processes import started

pytestmark = pytest.mark.cluster


def machine() -> dict[str, object]:
    """The state of this machine that a cluster must not change."""
    interfaces = sorted(path.name for path in Path("/sys/class/net").iterdir())
    forward = Path("/proc/sys/net/ipv4/ip_forward").read_text()
    names = [name for name in ("/etc/hosts", "/etc/passwd") if Path(name).exists()]
    files = {name: Path(name).read_text() for name in names}
    mounts = Path("/proc/self/mounts").read_text()
    ssh = sorted(path.name for path in Path("/root/.ssh").glob("*"))
    return {"interfaces": interfaces, "forward": forward, "mounts": mounts, "ssh": ssh, **files}


def users_of(folder: Path) -> list[str]:
    """Command lines of the processes with a cluster's folder in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mark = f"HVD_BERT_CLUSTER={folder}".encode()
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def test_stops_when_its_owner_is_killed(cluster: Cluster, folder: Path) -> None:
    before = machine()
    with started(["tail", "-f", "/dev/null"]) as owner:
        up = script("up.sh", "--owner", str(owner.pid), HVD_BERT_CLUSTER=str(folder))
        assert up.returncode == 0, up
        assert len(users_of(folder)) > 5
        watch = os.pidfd_open(int((folder / "watch.pid").read_text()))
        again = script("up.sh", HVD_BERT_CLUSTER=str(folder))
        assert again.returncode == 1 and "already running" in again.stderr, again
        owner.kill()
    assert select.select([watch], [], [], 60)[0], "the watching process has not ended"
    os.close(watch)
    assert not folder.exists() and users_of(folder) == []
    assert machine() == before
    cluster.on("login", ["sinfo"], folder.parent, timeout=60).expect(0)  # the other one is untouched
