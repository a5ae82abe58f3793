"""The official SQuAD evaluation scripts, from the PyPI wheel tf-models-official.

Only these two files are extracted from the wheel, into a cache outside the clone. Nothing is installed, and
TensorFlow is not needed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

VERSION = "2.20.0"
WHEEL_SHA256 = "0bf173f9ea83e1a83f983b35fe515e9d9bfd294b27538f6e8806afeb5a069150"
FOLDER = "official/nlp/tools"
NAMES = ("squad_evaluate_v1_1", "squad_evaluate_v2_0")


class NotReachableError(Exception):
    """The scripts are neither cached nor available from the package index."""


def folder() -> Path:
    """The cache folder with the two scripts, filled by pip on first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert"
    target = cache / f"tf-models-official-{VERSION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        wheel = _download(Path(work))
        staged = Path(work) / "scripts"
        staged.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in NAMES:
                (staged / f"{name}.py").write_bytes(archive.read(f"{FOLDER}/{name}.py"))
        try:
            staged.rename(target)  # atomic
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    return target


def _download(work: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
        "--timeout=10",
        f"--dest={work}",
        f"tf-models-official=={VERSION}",
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise NotReachableError(f"{error}: {(error.stderr or b'').decode()[-300:]}") from error
    (wheel,) = work.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise AssertionError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
    return wheel


@functools.cache
def scripts() -> tuple[types.ModuleType, types.ModuleType]:
    """The modules of v1.1 and v2.0. Raises NotReachableError."""
    scripts_folder = folder()
    if importlib.util.find_spec("absl") is None:  # only used for logging.error; tensorboard installs it
        absl = types.ModuleType("absl")
        absl.logging = logging  # type: ignore[attr-defined]
        sys.modules["absl"] = absl
    v1, v2 = (_load(scripts_folder / f"{name}.py") for name in NAMES)
    return v1, v2


def _load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
