"""env/container: the Apptainer recipe matches the Dockerfile, and the MPI operator's job fits the image."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from hvd_bert.config import command_line

REPOSITORY = Path(__file__).resolve().parents[2]
CONTAINER = REPOSITORY / "env" / "container"
DOCKERFILE = (CONTAINER / "Dockerfile").read_text(encoding="utf-8")


def found(pattern: str, text: str = DOCKERFILE) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match, pattern
    return match[1]


def installed(text: str) -> tuple[set[str], set[str]]:
    """Parse a recipe. Returns the packages that apt-get installs, and the options of env/setup.sh."""
    packages = found(r"--no-install-recommends \\\n((?:.*\\\n)*.*)", text).split("&&")[0].replace("\\", "")
    options = found(r"env/setup\.sh (.*?)(?: &&|\n)", text).replace("${SETUP}", found("^ARG SETUP=(--locked)$"))
    return set(packages.split()), set(options.split())


def test_apptainer_recipe_agrees_with_the_dockerfile() -> None:
    words = re.split(r"^%(\w+)\n", (CONTAINER / "hvd_bert.def").read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(words[1::2], words[2::2], strict=True))
    assert f"Bootstrap: docker\nFrom: {found(r'^ARG BASE=docker[.]io/(.+)$')}\n" in words[0]
    packages, options = installed(DOCKERFILE)
    assert installed(sections["post"]) == (packages - {"openssh-server"}, options)  # no ssh: Slurm starts the ranks
    files = dict(line.split() for line in sections["files"].strip().splitlines())
    assert files == {name: f"{found(r'^COPY [.] (.+)$')}/{name}" for name in files}
    # Apptainer has no .dockerignore, so %files must list what to copy, without .venv and runs.
    assert {"README.md", "pyproject.toml", "requirements.txt", "env", "hvd_bert"} <= set(files)
    for name in files:
        assert (REPOSITORY / name).exists() and not name.startswith((".", "outputs", "runs"))
    path = found(r"^ENV PATH=(.*):[$][{]PATH[}]$")
    assert sections["environment"].strip() == f"export PATH={path}:$PATH"


def test_job_of_the_mpi_operator_fits_the_image() -> None:
    """A slot has one rank and one GPU, the trainer accepts the flags, and user ID and ssh folder match the image."""
    job = yaml.safe_load((CONTAINER / "mpijob.yaml").read_text())["spec"]
    pods = {name: replica["template"]["spec"] for name, replica in job["mpiReplicaSpecs"].items()}
    args = pods["Launcher"]["containers"][0]["args"]
    slots = job["slotsPerWorker"]
    assert int(args[args.index("-np") + 1]) == job["mpiReplicaSpecs"]["Worker"]["replicas"] * slots
    assert pods["Worker"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == slots
    start = args.index("hvd_bert.train")
    assert args[start - 2 : start] == ["python", "-m"]
    command_line.parse(args[start + 1 :])
    home = f"/home/{found(r'--uid [0-9]+ .*? ([a-z_]+) &&')}/.ssh"
    assert job["sshAuthMountPath"] == home and f"HostKey {home}/" in DOCKERFILE
    for pod in pods.values():
        container = pod["containers"][0]
        assert container["securityContext"]["runAsUser"] == int(found(r"--uid ([0-9]+) "))
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
