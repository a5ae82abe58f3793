"""Starts a cluster once for the tests of this folder in a process, and always stops it."""

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
# The scripts also run Python to ask for a host's interface.
ASKED_FOR_INTERFACE = f'case "$*" in "-m hvd_bert.distributed.interfaces "*) exec "{sys.executable}" "$@" ;; esac'


def new_folder() -> Path:
    """A folder for a separate cluster. Short, because paths of sockets are limited."""
    return Path(f"/tmp/hvd_{uuid.uuid4().hex[:8]}")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The running cluster; skips if it cannot run here. It also stops if this process is killed."""
    place = new_folder()
    started = script("up.sh", "--owner", str(os.getpid()), HVD_BERT_CLUSTER=str(place))
    if started.returncode == CANNOT_RUN_HERE:
        pytest.skip(started.stderr.strip())
    assert started.returncode == 0, started.stderr
    cluster = Cluster(place)
    server = cluster.serve_commands()
    yield cluster
    fork_server.end(server)
    script("down.sh", HVD_BERT_CLUSTER=str(place)).check_returncode()
    assert not place.exists()


@pytest.fixture
def folder(cluster: Cluster) -> Iterator[Path]:
    """The folder of another cluster, which stops with the test."""
    place = new_folder()
    yield place
    script("down.sh", HVD_BERT_CLUSTER=str(place)).check_returncode()
    assert not place.exists()


@pytest.fixture
def watched(tmp_path: Path) -> dict[str, str]:
    """An environment whose `python` starts the trainer through altered.py."""
    folder = tmp_path / "watched" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\n{ASKED_FOR_INTERFACE}\nexec "{served(sys.executable)}" "{FOLDER / "altered.py"}" "$@"\n'
    )
    python.chmod(0o755)
    (folder / "horovodrun").symlink_to(programs() / "horovodrun")
    return {
        "HVD_BERT_VENV": str(folder.parent),
        "PATH": f"{folder}:{programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WATCHED_LOG": str(tmp_path / "watched.log"),
    }


@pytest.fixture
def pretended(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """pretended(script) -> environment of a job whose `python` is a shell script, to test hvd.slurm alone."""

    def make(script: str) -> dict[str, str]:
        folder = tmp_path / "pretended" / "bin"
        folder.mkdir(parents=True)
        (folder / "python").write_text(f"#!/usr/bin/env bash\n{ASKED_FOR_INTERFACE}\n{script}\n")
        (folder / "python").chmod(0o755)
        return {"HVD_BERT_VENV": str(folder.parent)}

    return make


@pytest.fixture
def listeners(tmp_path: Path) -> Path:
    """Folder in which each rank notes what listens on its host while it trains (altered.py)."""
    folder = tmp_path / "listeners"
    folder.mkdir()
    return folder
