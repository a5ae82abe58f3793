"""`hvd-bert doctor --hosts` checks two hosts by ssh, and names hosts that it cannot reach or that lack something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import read_report
from harness import RANK_INFOS, Cluster, Environment

pytestmark = pytest.mark.cluster
DOCTOR = "hvd-bert doctor --hosts"
BOTH = "a100-01:2,a100-02:2"


@pytest.fixture
def without_environment(cluster: Cluster) -> Iterator[None]:
    """Hide the environment on a100-02 during the test."""
    cluster.on("a100-02", ["mount", "-t", "tmpfs", "tmpfs", sys.prefix], Path("/")).expect(0)
    yield
    cluster.on("a100-02", ["umount", "--lazy", sys.prefix], Path("/")).expect(0)


def failures(
    cluster: Cluster, cwd: Path, arguments: str, env: Environment | None = None
) -> list[tuple[str, list[str], str]]:
    """Return the name, hosts and finding of each failed check."""
    report = read_report(cluster.on("login", f"{DOCTOR} {arguments} --json", cwd, env).expect(2))
    assert not report["ready"] and not report["command"]
    return [(line["name"], line["hosts"], line["found"]) for line in report["checks"] if line["status"] == "failure"]


def test_hosts_that_pass(cluster: Cluster, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two nodes\na100-01 slots=2\n\na100-02:2\n")
    env = {"HVD_BERT_INTERFACE": "10.77.0.0/16"}
    outcome = cluster.on("login", f"hvd-bert doctor --verbose --hostfile {hostfile}", tmp_path, env).expect(0)
    cells = [line.split() for line in outcome.output.splitlines()]
    table = [tuple(row[:5]) for row in cells if row[3:4] == ["cpu"]]
    assert table == [(host, str(rank), str(local), "cpu", "eth0") for rank, host, local, _ in RANK_INFOS], outcome
    setting, _, *words = cells[-1]
    assert setting == "HVD_BERT_INTERFACE=10.77.0.0/16", outcome
    assert words[:6] == ["-np", "4", "-H", BOTH, "--network-interfaces", "eth0"], outcome


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        ("a100-08:2,a100-09:2", "Name", "does not resolve"),
        (f"{BOTH} --ssh-port 2222", "ssh", "port 2222: Connection refused"),
        (f"{BOTH} --ssh-identity-file /etc/hostname", "ssh", "Permission denied (publickey,password)."),
        (f"{BOTH} --timeout 1", "Doctor", "not finished after 1 s"),
    ],
    ids=["name", "port", "password", "timeout"],
)
def test_hosts_that_cannot_be_reached(cluster: Cluster, tmp_path: Path, arguments: str, name: str, words: str) -> None:
    hosts = [entry.split(":")[0] for entry in arguments.split()[0].split(",")]
    found = failures(cluster, tmp_path, arguments)
    assert [(*row[:2], words in row[2]) for row in found] == [(name, [host], True) for host in hosts], found


def test_host_without_the_environment(cluster: Cluster, tmp_path: Path, without_environment: None) -> None:
    cold = {"HVD_BERT_TEST_COLD": "1"}  # without the fork server, whose Python is not hidden
    ((name, hosts, text),) = failures(cluster, tmp_path, BOTH, cold)
    assert (name, hosts) == ("Clone", ["a100-02"]) and sys.executable in text


def test_host_without_the_interface(cluster: Cluster, tmp_path: Path) -> None:
    ((name, _, text),) = failures(cluster, tmp_path, "a100-02:2", {"HVD_BERT_INTERFACE": "10.99.0.0/16"})
    assert name == "World" and "no interface of this name or subnet" in text and "eth0 10.77.0.12" in text
