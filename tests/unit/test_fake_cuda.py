"""The checks on made-up GPUs (tests/fake_cuda)."""

from __future__ import annotations

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
# checks.py itself can be imported only on the made-up machine.
CHECKS = re.findall(r"^def (\w+)\(\) -> None", (FOLDER / "checks.py").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch has GPUs of its own")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, as the set-up of Horovod")
def test_on_a_made_up_gpu(tmp_path: Path) -> None:
    library = tmp_path / "libdevice.so"
    compiler = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", str(FOLDER / "device.cpp")]
    linked = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}", "-o", str(library)]
    subprocess.run([*compiler, *linked], check=True, timeout=300)
    command = [sys.executable, str(FOLDER / "machine.py"), str(library), *CHECKS]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
