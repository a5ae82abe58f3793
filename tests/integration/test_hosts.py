"""Train on a host whose name does not resolve, whose loopback is down, or whose home is read-only."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from commands import small_run
from launch import TRAIN, Outcome, launcher, programs, run

pytestmark = pytest.mark.integration
# Shell commands that change the host inside new namespaces. In a new network namespace, no interface is up.
UNRESOLVED, NO_LOOPBACK, NO_HOME = "hostname unresolved", "true", 'mount -t tmpfs -o ro tmpfs "$HOME"'
NAMESPACE = {UNRESOLVED: "--uts", NO_LOOPBACK: "--net", NO_HOME: "--mount"}


@functools.cache
def may_unshare() -> bool:
    return subprocess.run(["unshare", *NAMESPACE.values(), "true"], capture_output=True).returncode == 0


def run_on(host: str, command: list[str], folder: Path) -> Outcome:
    """Run a command in new namespaces that act as the host."""
    if not may_unshare():
        pytest.skip("needs root, or another right to make namespaces")
    inside = ["unshare", NAMESPACE[host], "sh", "-c", f'{host} && exec "$@"', "sh", *command]
    if not (programs() / "unresolved").exists():
        (programs() / "unresolved").symlink_to(os.uname().nodename)  # the fork server also serves this host name
    home = folder / "home"
    home.mkdir()
    return run(inside, folder, env={"HOME": str(home), "HVD_BERT_CACHE": str(folder / "cache")})


@pytest.mark.parametrize(
    ("host", "by", "strategy", "status"),
    [
        (UNRESOLVED, "none", "horovod", 2),
        (UNRESOLVED, "gloo", "horovod", 1),  # horovodrun exits with 1
        (UNRESOLVED, "none", "ddp", 0),
        (UNRESOLVED, "mpi", "horovod", 0),
        (NO_LOOPBACK, "none", "horovod", 2),
        (NO_LOOPBACK, "none", "ddp", 2),
        (NO_LOOPBACK, "none", "none", 0),
    ],
)
def test_trains_or_names_the_remedy(host: str, by: str, strategy: str, status: int, tmp_path: Path) -> None:
    size = 1 if by == "none" else 2
    command = [*launcher(size, by), *small_run(size, "out", "--strategy", strategy, "--max_steps", 2)]
    outcome = run_on(host, command, tmp_path).expect(status)
    if status:
        assert outcome.output.count("hvd_bert: ") == 1 and (by == "gloo" or outcome.output.count("\n") == 1), outcome
        assert ("/etc/hosts" if host == UNRESOLVED else "ip link set lo up") in outcome.output, outcome
    assert (tmp_path / "out").exists() == (status == 0)


def test_doctor_reports_it_once(tmp_path: Path) -> None:
    command = [*launcher(2, "gloo"), "hvd-bert", "doctor", "--size", "1"]
    outcome = run_on(UNRESOLVED, command, tmp_path)
    assert (outcome.status, outcome.output.count("/etc/hosts")) == (1, 1), outcome


def test_doctors_line_starts_with_a_read_only_home(tmp_path: Path) -> None:
    for name in ("doctor", "train"):
        (tmp_path / name).mkdir()
    outcome = run_on(NO_HOME, ["hvd-bert", "doctor", "-H", "localhost:2"], tmp_path / "doctor").expect(0)
    line = shlex.split(outcome.output.splitlines()[-1])
    assert "--disable-cache" in line, outcome
    flags = small_run(2, "out", "--max_steps", 2)[len(TRAIN) :]
    run_on(NO_HOME, [*line, *flags], tmp_path / "train").expect(0)
