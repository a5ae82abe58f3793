"""The official SQuAD evaluation scripts, from the PyPI wheel tf-models-official.

The wheel is cached outside the clone and not installed. TensorFlow is not needed.
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
import zipimport
from pathlib import Path

VERSION = "2.20.0"
WHEEL = f"tf_models_official-{VERSION}-py2.py3-none-any.whl"
WHEEL_SHA256 = "0bf173f9ea83e1a83f983b35fe515e9d9bfd294b27538f6e8806afeb5a069150"
FOLDER = "official/nlp/tools"
NAMES = ("squad_evaluate_v1_1", "squad_evaluate_v2_0")
PIP = "pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --retries=1 --timeout=10"


class NotReachableError(Exception):
    """The scripts are not cached, and pip cannot download them."""


def _download(wheel: Path) -> None:
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        command = [sys.executable, "-m", *PIP.split(), f"--dest={folder}", f"tf-models-official=={VERSION}"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise NotReachableError(f"{error}: {(error.stderr or b'').decode()[-300:]}") from error
        downloaded = Path(folder, wheel.name)
        digest = hashlib.sha256(downloaded.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise AssertionError(f"{wheel.name} has SHA-256 {digest}, expected {WHEEL_SHA256}")
        downloaded.rename(wheel)  # atomic, so the cache never has half a wheel


@functools.cache
def scripts() -> tuple[types.ModuleType, types.ModuleType]:
    """Import the scripts from the wheel, which is downloaded unless it is cached. Raises NotReachableError.

    Returns the modules for SQuAD v1.1 and v2.0.
    """
    wheel = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvd_bert" / WHEEL
    if not wheel.is_file():
        _download(wheel)
    if importlib.util.find_spec("absl") is None:  # the scripts only call absl.logging.error
        absl = types.ModuleType("absl")
        absl.logging = logging  # type: ignore[attr-defined]
        sys.modules["absl"] = absl
    v1, v2 = (_load(zipimport.zipimporter(str(wheel / FOLDER)), name) for name in NAMES)
    return v1, v2


def _load(importer: zipimport.zipimporter, name: str) -> types.ModuleType:
    spec = importer.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
