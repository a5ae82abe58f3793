"""System packages: set-up names each with its reason before it installs it, and --no-apt installs none."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_setup import ROOT, Machine

PYTHONS = ("python3", *(f"python3.{minor}" for minor in range(10, 16)))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A Debian without Python and Slurm, where the user is root and apt-get only writes down what it is told."""
    if not Path("/etc/debian_version").exists():
        pytest.skip("needs Debian")
    made = Machine(tmp_path)
    made.program("id", "echo 0\n")
    made.program("apt-get", f'echo "$@" >>{tmp_path}/apt\n')
    made.without(*PYTHONS, "srun")
    return made


def installed(machine: Machine) -> str:
    file = machine.folder / "apt"
    return file.read_text() if file.exists() else ""


def test_packages_are_named_with_their_reasons_before_they_are_installed(machine: Machine) -> None:
    result = machine.run("setup.sh", "--venv", str(machine.folder / "venv"))
    assert result.returncode == 1 and "no Python 3.10 or later" in result.stderr, result
    assert "install -y --no-install-recommends python3 python3-venv python3-dev\n" in installed(machine)
    assert "installing with apt (--no-apt prevents this" in result.stdout
    assert re.search(r"^ +python3-dev +Python's headers, to build Horovod$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize(("script", "status"), [("setup.sh", 1), ("cluster_packages.sh", 3)])
def test_no_apt_installs_nothing(machine: Machine, script: str, status: int) -> None:
    where = ["--venv", str(machine.folder / "venv")] if script == "setup.sh" else []
    result = machine.run(script, *where, "--no-apt")
    assert result.returncode == status, result
    assert "apt-get install" in result.stderr, "what the user can do"
    assert installed(machine) == "" and "installing" not in result.stdout


def test_every_package_has_a_reason() -> None:
    """The packages in the scripts' arrays and calls."""
    texts = [(ROOT / "env" / name).read_text() for name in ("setup.sh", "cluster_packages.sh")]
    named = re.findall(r"(?:packages\+?=|try_apt )\(?([a-z][\w+. -]*)", "\n".join(texts))
    packages = sorted({package for names in named for package in names.split()})
    assert {"g++", "make", "libopenmpi-dev", "python3-venv", "slurmd", "iproute2"} <= set(packages)
    script = '. env/apt.sh; for package in "$@"; do apt_reason "$package"; done'
    said = subprocess.run(["bash", "-euc", script, "-", *packages], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0 and len(said.stdout.splitlines()) == len(packages), said.stderr


@pytest.mark.parametrize(
    ("script", "words", "without_apt", "others"),
    [
        ("demo.sh", ["--seed", "2"], ["setup.sh --no-apt"], "--log_format plain --seed 2\n"),
        (
            "test.sh",
            ["tests/cluster", "-x"],
            ["setup.sh --dev --deepspeed --no-apt", "cluster_packages.sh --no-apt"],
            "python -m pytest tests/cluster -x\n",
        ),
    ],
    ids=["demo", "test"],
)
@pytest.mark.parametrize("first", [True, False])
def test_scripts_pass_no_apt_on(
    tmp_path: Path, script: str, words: list[str], without_apt: list[str], others: str, first: bool
) -> None:
    """In a copy whose programs only write down their arguments."""
    programs = [f".venv/bin/{name}" for name in ("python", "horovodrun", "hvd-bert")]
    for name in ("env/setup.sh", "env/cluster_packages.sh", *programs):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{path.name} $*" >>"{tmp_path}/started"\n')
        path.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / script, tmp_path / "scripts")
    words = ["--no-apt", *words] if first else [*words, "--no-apt"]
    subprocess.run(["bash", f"scripts/{script}", *words], cwd=tmp_path, check=True, capture_output=True)
    started = (tmp_path / "started").read_text()
    assert [line for line in started.splitlines() if "--no-apt" in line] == without_apt
    assert others in started
