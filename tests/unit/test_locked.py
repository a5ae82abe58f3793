"""env/locked/: the locked versions match the requirements files, for every supported Python version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKED = ROOT / "env" / "locked"
FILES = {
    "base": ROOT / "requirements.txt",
    "torch": ROOT / "requirements.txt",
    "dev": ROOT / "env" / "requirements-dev.txt",
    "deepspeed": ROOT / "env" / "requirements-deepspeed.txt",
    "bench": ROOT / "env" / "requirements-bench.txt",
}
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")


def pins(path: Path, python: str) -> dict[str, str]:
    """Read a lock or requirements file. Returns {package: version specifier} for Linux and this Python version."""
    found = {}
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].rstrip(" \\")
        if not text or text.startswith(" "):
            continue
        requirement = Requirement(text)
        environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found[requirement.name.lower().replace("_", "-")] = str(requirement.specifier)
    return found


@pytest.mark.parametrize("python", SUPPORTED)
@pytest.mark.parametrize("name", FILES)
def test_the_locked_versions_are_the_required_ones(name: str, python: str) -> None:
    required, locked = pins(FILES[name], python), pins(LOCKED / f"{name}.txt", python)
    if FILES[name].name == "requirements.txt":  # torch has its own file, Horovod none: its build checks the hash
        required = {package: pin for package, pin in required.items() if (package == "torch") == (name == "torch")}
        required.pop("horovod", None)
    assert required and required.items() <= locked.items(), "run `bash env/lock.sh`"


@pytest.mark.parametrize("python", SUPPORTED)
def test_pip_installs_what_is_required_except_horovod_and_mpi(python: str) -> None:
    declared = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert declared
    allowed = {r.name.lower(): r.specifier for r in map(Requirement, re.findall(r'"(.+?)"', declared[1]))}
    required = {name.replace("-", "_"): pin for name, pin in pins(ROOT / "requirements.txt", python).items()}
    allowed = {name.replace("-", "_"): specifier for name, specifier in allowed.items()}
    assert required.keys() - allowed.keys() == {"horovod", "mpi4py"} and allowed.keys() <= required.keys()
    assert all(specifier.contains(required[name].removeprefix("==")) for name, specifier in allowed.items())


@pytest.mark.parametrize("name", FILES)
def test_every_locked_package_has_hashes_and_no_address(name: str) -> None:
    text = (LOCKED / f"{name}.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert "://" not in text and "--index" not in text
