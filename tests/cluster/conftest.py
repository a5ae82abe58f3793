"""Brings the cluster up once for the tests of this folder, and always down again."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import start as fork_server
from harness import FOLDER, Cluster, script
from launch import programs, served

CANNOT_RUN_HERE = 3


def new_folder() -> Path:
    """For a cluster of its own, beside those of others; short, since the paths of sockets are."""
    return Path(f"/tmp/hvd_{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, up; skips where it cannot run. Should this process be killed, it goes down all the same."""
    place = new_folder()
    started = script("up.sh", "--owner", str(os.getpid()), HVD_BERT_CLUSTER=str(place))
    if started.returncode == CANNOT_RUN_HERE:
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    cluster = Cluster(place)
    servers = cluster.serve_commands()
    yield cluster
    for server in servers:
        fork_server.end(server)
    script("down.sh", HVD_BERT_CLUSTER=str(place)).check_returncode()
    assert not place.exists()


@pytest.fixture
def folder(cluster: Cluster) -> Iterator[Path]:
    """The folder of one more cluster, which goes down with the test."""
    place = new_folder()
    yield place
    script("down.sh", HVD_BERT_CLUSTER=str(place)).check_returncode()
    assert not place.exists()


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """Environment in which `python` is this environment's with watched.py in front of the trainer."""
    folder = tmp_path / "watched" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{served(sys.executable)}" "{FOLDER / "watched.py"}" "$@"\n')
    python.chmod(0o755)
    (folder / "horovodrun").symlink_to(programs() / "horovodrun")
    return {
        "HVD_BERT_VENV": str(folder.parent),
        "PATH": f"{folder}:{programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WATCHED_LOG": str(tmp_path / "watched.log"),
    }


@pytest.fixture
def pretended(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """pretended(script) -> environment of a job whose `python` is a shell script: only hvd.slurm itself is tried."""

    def make(script: str) -> dict[str, str]:
        folder = tmp_path / "pretended" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").write_text(f"#!/usr/bin/env bash\n{script}\n")
        (folder / "python").chmod(0o755)
        return {"HVD_BERT_VENV": str(folder.parent)}

    return make
