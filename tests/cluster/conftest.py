"""Fixtures for the test cluster, which starts once per process, and for altered environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import losses
from fork_server import start as fork_server
from harness import FOLDER, SMALL, Cluster, new_environment, started_cluster
from launch import programs, served


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The running cluster, whose Python commands the fork server runs."""
    with started_cluster() as cluster:
        server = cluster.serve_commands()
        yield cluster
        fork_server.end(server)


@pytest.fixture(scope="session")
def one_process(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of four steps of 16 windows in one process, as a reference for four ranks."""
    folder = tmp_path_factory.mktemp("one_process")
    command = f"python -m hvd_bert.train {SMALL} 4 --per_device_train_batch_size 16 --strategy none --output_dir out"
    cluster.on("a100-01", command, folder).expect(0)
    return losses(folder / "out")


@pytest.fixture
def altered(tmp_path: Path) -> dict[str, str]:
    """An environment whose `python` starts the trainer through altered.py."""
    folder = new_environment(tmp_path / "altered", f'exec "{served(sys.executable)}" "{FOLDER / "altered.py"}" "$@"')
    path = f"{folder}:{programs()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HVD_BERT_VENV": str(folder.parent), "PATH": path}


@pytest.fixture
def watched(tmp_path: Path, altered: dict[str, str]) -> dict[str, str]:
    """The environment `altered`, with a log of watched events."""
    return altered | {"WATCHED_LOG": str(tmp_path / "watched.log")}


@pytest.fixture
def pretended(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """A function that returns a job's environment whose `python` is the given shell script, to test hvd.slurm alone."""
    return lambda script: {"HVD_BERT_VENV": str(new_environment(tmp_path / "pretended", script).parent)}


@pytest.fixture
def listeners(tmp_path: Path) -> Path:
    """The folder in which each rank writes the programs that listen on its host (altered.py)."""
    folder = tmp_path / "listeners"
    folder.mkdir()
    return folder
