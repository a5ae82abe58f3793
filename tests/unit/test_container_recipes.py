"""env/container: the Apptainer recipe makes the same image as the Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hvd_bert.config import command_line

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = (REPOSITORY / "env/container/Dockerfile").read_text(encoding="utf-8")
DEFINITION = (REPOSITORY / "env/container/hvd_bert.def").read_text(encoding="utf-8")
SECTIONS = {"files", "post", "environment", "test"}  # of those that Apptainer knows


def parts() -> tuple[dict[str, str], dict[str, str]]:
    """The header's fields and the sections' text, as Apptainer reads a definition."""
    words = re.split(r"^%(\w+)\n", DEFINITION, flags=re.MULTILINE)
    header = re.sub(r"^#.*\n", "", words[0], flags=re.MULTILINE).strip()
    return dict(line.split(": ") for line in header.splitlines()), dict(zip(words[1::2], words[2::2], strict=True))


def packages(text: str) -> set[str]:
    """What apt-get installs."""
    found = re.search(r"--no-install-recommends \\\n((?:.*\\\n)*.*)", text)
    assert found
    return set(found[1].split("&&")[0].replace("\\", "").split())


def set_up_options(text: str) -> set[str]:
    found = re.search(r"env/setup\.sh (.*?)(?: &&|\n)", text)
    assert found
    return set(found[1].replace("${SETUP}", "--locked").split())


def test_sections_and_base() -> None:
    header, sections = parts()
    assert set(sections) == SECTIONS
    base = re.search(r"^ARG BASE=docker\.io/(\S+)$", DOCKERFILE, re.MULTILINE)
    assert base and header == {"Bootstrap": "docker", "From": base[1]}


@pytest.mark.parametrize("read", [packages, set_up_options])
def test_commands_are_the_dockerfiles(read) -> None:
    assert re.search(r"^ARG SETUP=--locked$", DOCKERFILE, re.MULTILINE)
    assert read(parts()[1]["post"]) == read(DOCKERFILE) - {"openssh-server"}  # Slurm starts the ranks


def test_files_and_environment() -> None:
    sections = parts()[1]
    copied = re.search(r"^COPY \. (\S+)$", DOCKERFILE, re.MULTILINE)
    path = re.search(r"^ENV PATH=(.*):\$\{PATH\}$", DOCKERFILE, re.MULTILINE)
    assert copied
    files = dict(line.split() for line in sections["files"].strip().splitlines())
    assert files == {name: f"{copied[1]}/{name}" for name in files}
    # Apptainer has no .dockerignore: it must be given what the package and its set-up need, and no .venv or runs.
    assert {"README.md", "pyproject.toml", "requirements.txt", "env", "hvd_bert"} <= set(files)
    for name in files:
        assert (REPOSITORY / name).exists() and not name.startswith((".", "outputs", "runs"))
    assert path and sections["environment"].strip() == f"export PATH={path[1]}:$PATH"


# Env/container/mpijob.yaml: its numbers agree, and its command is one that the trainer takes

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
