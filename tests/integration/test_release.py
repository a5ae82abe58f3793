"""The sdist and the wheel: they are built from the files in git, and the wheel works without the clone and Horovod."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from launch import REPOSITORY, run

import hvd_bert

pytestmark = [pytest.mark.integration, pytest.mark.slow]
BUILD_SDIST = [sys.executable, "-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
BUILD_WHEEL = [*PIP, "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist"]
NAME = f"hvd_bert-{hvd_bert.__version__}"
OWN_CACHES = dict.fromkeys(("PYTHONPATH", "HF_HOME", "HVD_BERT_CACHE", "XDG_CACHE_HOME"))  # below $HOME instead


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    if not (shutil.which("git") and (REPOSITORY / ".git").exists()):
        pytest.skip("not a clone")
    found = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {name for name in found.stdout.split("\0") if (REPOSITORY / name).is_file()}


@pytest.fixture(scope="module")
def dist(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from the files in git and the wheel from the sdist, without a network. Returns their folder."""
    clone = tmp_path_factory.mktemp("clone")
    for name in tracked:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((REPOSITORY / name).read_bytes())
    run(BUILD_SDIST, clone, cold=True).expect(0)
    run([*BUILD_WHEEL, f"dist/{NAME}.tar.gz"], clone, cold=True).expect(0)
    return clone / "dist"


def test_packages_have_the_files_of_the_package_and_no_tests(dist: Path, tracked: set[str]) -> None:
    package = {name for name in tracked if name.startswith("hvd_bert/")}
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        assert {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")} == package
        metadata = HeaderParser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())
        assert f"{NAME}.dist-info/licenses/LICENSE" in wheel.namelist()
    assert metadata["Version"] == hvd_bert.__version__ and metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload() == (REPOSITORY / "README.md").read_text(encoding="utf-8")
    with tarfile.open(dist / f"{NAME}.tar.gz") as sdist:
        names = {member.name.removeprefix(f"{NAME}/") for member in sdist if member.isfile()}
    made = {name for name in names if re.match(r"PKG-INFO$|setup\.cfg$|hvd_bert\.egg-info/", name)}
    others = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"}
    assert names - made == package | others


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel and, except for Horovod, links to the packages of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python, wheel = folder / "bin" / "python", dist / f"{NAME}-py3-none-any.whl"
    run([*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], folder, cold=True).expect(0)
    (site,) = (path.parent for path in folder.glob("lib/*/*-packages/hvd_bert"))
    for path in (
        entry for place in map(Path, sys.path) if place.name.endswith("-packages") for entry in place.iterdir()
    ):
        if path.suffix != ".pth" and not re.match("horovod|hvd_bert|__", path.name) and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return folder


def test_wheel_trains_and_answers_without_the_clone_and_horovod(environment: Path, tmp_path: Path) -> None:
    def printed(program: str, *words: str | int) -> str:
        env = {**OWN_CACHES, "HOME": str(tmp_path / "home")}
        command = [str(environment / "bin" / program), *map(str, words)]
        return run(command, tmp_path, env=env, cold=True).expect(0).output

    (tmp_path / "home").mkdir()
    looked_up = "import hvd_bert, importlib.util as u; print(hvd_bert.__file__, u.find_spec('horovod'))"
    where, horovod = printed("python", "-c", looked_up).split()
    assert Path(where).is_relative_to(environment) and horovod == "None"
    for words in ([], ["train"], ["bench", "sweep"]):
        assert printed("hvd-bert", *words, "--help").startswith("usage: ")
    size = ["--max_train_samples", 64, "--max_eval_samples", 8, "--max_steps", 20, "--per_device_train_batch_size", 4]
    printed("python", "-m", "hvd_bert.train", "--config", "sample", *size, "--output_dir", "out")
    asked = ["--context", "Ada was born in London.", "--question", "Where was Ada born?"]
    assert "  A: " in printed("hvd-bert", "predict", "out", *asked)
    printed("hvd-bert", "evaluate", "out", "--json", "scores.json")
    printed("hvd-bert", "report", "out")
    assert "f1" in (tmp_path / "scores.json").read_text(encoding="utf-8")
    assert "<style>" in (tmp_path / "out" / "report" / "report.html").read_text(encoding="utf-8")
