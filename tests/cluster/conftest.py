"""Starts a cluster once for the tests of this folder in a process, and always stops it."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_server import start as fork_server
from harness import FOLDER, Cluster, new_environment, script
from launch import programs, served

CANNOT_RUN_HERE = 3


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
def altered(tmp_path: Path) -> dict[str, str]:
    """An environment whose `python` starts the trainer through altered.py."""
    folder = new_environment(tmp_path / "altered", f'exec "{served(sys.executable)}" "{FOLDER / "altered.py"}" "$@"')
    path = f"{folder}:{programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HVD_BERT_VENV": str(folder.parent), "PATH": path}


@pytest.fixture
def watched(tmp_path: Path, altered: dict[str, str]) -> dict[str, str]:
    """The environment `altered`, with a log."""
    return altered | {"WATCHED_LOG": str(tmp_path / "watched.log")}


@pytest.fixture
def pretended(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """pretended(script) -> environment of a job whose `python` is a shell script, to test hvd.slurm alone."""
    return lambda script: {"HVD_BERT_VENV": str(new_environment(tmp_path / "pretended", script).parent)}


@pytest.fixture
def listeners(tmp_path: Path) -> Path:
    """Folder in which each rank notes what listens on its host while it trains (altered.py)."""
    folder = tmp_path / "listeners"
    folder.mkdir()
    return folder
