"""env/container/mpijob.yaml: its numbers agree, and its command is one that the trainer takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvd_bert.config import command_line

CONTAINER = Path(__file__).resolve().parents[2] / "env" / "container"


@pytest.fixture(scope="module")
def job() -> Any:
    return yaml.safe_load((CONTAINER / "mpijob.yaml").read_text())["spec"]


def test_the_ranks_are_the_slots_and_the_gpus(job: Any) -> None:
    worker, launcher = job["mpiReplicaSpecs"]["Worker"], job["mpiReplicaSpecs"]["Launcher"]
    args = launcher["template"]["spec"]["containers"][0]["args"]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(args[args.index("-np") + 1]) == worker["replicas"] * job["slotsPerWorker"]
    assert limits["nvidia.com/gpu"] == job["slotsPerWorker"]


def test_the_trainer_takes_the_command(job: Any) -> None:
    args = job["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    start = args.index("hvd_bert.train")
    assert args[start - 2 : start] == ["python", "-m"]
    command_line.parse(args[start + 1 :])


def test_the_user_and_the_folders_are_the_images(job: Any) -> None:
    dockerfile = (CONTAINER / "Dockerfile").read_text()
    user = re.search(r"--uid (\d+) .*? (\w+) &&", dockerfile)
    assert user
    assert job["sshAuthMountPath"] == f"/home/{user[2]}/.ssh" and f"HostKey /home/{user[2]}/.ssh/" in dockerfile
    for replica in job["mpiReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        container = pod["containers"][0]
        assert container["securityContext"]["runAsUser"] == int(user[1])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
