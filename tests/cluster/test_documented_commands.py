"""Slurm accepts the sbatch commands of the pages, for the nodes that this cluster has."""

from __future__ import annotations

import shlex

import documented
import pytest
from harness import Cluster
from launch import REPOSITORY

pytestmark = pytest.mark.cluster

ELSEWHERE = ("h100", "--nodes=4")  # nodes that this cluster lacks


def test_sbatch_commands_are_accepted(cluster: Cluster) -> None:
    commands = {
        command for page in documented.GUIDES for fence in documented.fences(page) for command in fence.commands
    }
    accepted = [shlex.split(command) for command in sorted(commands) if command.startswith("sbatch ")]
    accepted = [words for words in accepted if not any(name in word for word in words for name in ELSEWHERE)]
    assert len(accepted) > 5
    for words in accepted:
        cluster.on("login", ["sbatch", "--test-only", *words[1:]], REPOSITORY, timeout=60).expect(0)
