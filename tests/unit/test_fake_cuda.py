"""Checks on fake GPUs (tests/fake_cuda); a single process runs all checks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import environment

FOLDER = Path(__file__).resolve().parents[1] / "fake_cuda"
TORCH = Path(torch.__file__).parent
# Find the checks' names in the text: only the process with fake GPUs can import checks.py.
CHECKS = re.findall(r"^@check\ndef (\w+)", (FOLDER / "checks.py").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Compile the fake device and run all checks. Returns {check: traceback, or None if it passed}."""
    folder = tmp_path_factory.mktemp("machine")
    library, file = folder / "libdevice.so", folder / "results.json"
    compiler = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", str(FOLDER / "device.cpp")]
    linked = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}", "-o", str(library)]
    subprocess.run([*compiler, *linked], check=True, timeout=300)
    command = [sys.executable, str(FOLDER / "machine.py"), str(library), str(file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str | None] = json.loads(file.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="made-up GPUs need a CPU build of torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, as the set-up of Horovod")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_made_up_gpu(name: str, failures: dict[str, str | None]) -> None:
    if failures[name]:
        pytest.fail(failures[name], pytrace=False)
