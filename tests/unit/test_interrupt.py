"""Ctrl-C in any command, at any moment: one line, status 130, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Interrupts the process at the import of a module.
SITECUSTOMIZE = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""
# The command, and a module that it imports later than its own.
COMMANDS = {
    "train": (["hvd_bert.train", "--config", "sample"], "hvd_bert.train.loop"),  # once the ranks have met
    "bench": (["hvd_bert.tools.bench", "--random"], "numpy"),
    "sweep": (["hvd_bert.tools.bench", "sweep"], "yaml"),
    "tune": (["hvd_bert.tools.tune"], "yaml"),
    "report": (["hvd_bert.tools.report", "runs"], "matplotlib"),
    "timeline": (["hvd_bert.tools.timeline", "file"], "numpy"),
    "predict": (["hvd_bert.predict", "model", "--context", "a", "--question", "b"], "torch"),
    "doctor": (["hvd_bert.tools.doctor"], "hvd_bert.tools.doctor.diagnosis"),
    "sample": (["hvd_bert.sample.generate"], "hvd_bert.sample.passages"),
}


@pytest.fixture(scope="module")
def interrupting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupting")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    return folder


def end_of(words: list[str], module: str, interrupting: Path, stderr: Any = subprocess.PIPE) -> tuple[int, str]:
    """Run a command that is interrupted at the import of a module. Returns its status and standard error."""
    path = os.pathsep.join([str(interrupting), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60,
        cwd=interrupting, env={**os.environ, "PYTHONPATH": path, "INTERRUPTED_AT": module},
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("moment", ["first import", "later"])
@pytest.mark.parametrize("name", COMMANDS)
def test_interrupted_command(name: str, moment: str, interrupting: Path) -> None:
    words, later = COMMANDS[name]
    first = words[0] if words[0].endswith("generate") else f"{words[0]}.__main__"
    module = first if moment == "first import" else later
    assert end_of(words, module, interrupting) == (130, "hvd_bert: interrupted\n")


def test_interrupted_without_a_reader(interrupting: Path) -> None:
    """Ctrl-C also ends the `tee` that reads a command's output."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        assert end_of(["hvd_bert.tools.timeline", "file"], "numpy", interrupting, stderr)[0] == 130


def test_importing_the_package_keeps_the_handler() -> None:
    program = "import signal, hvd_bert; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_ignored_interrupt_stays_ignored(interrupting: Path) -> None:
    """In a background job of a script, for example."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited
    try:
        assert end_of(["hvd_bert.tools.timeline", "--help"], "numpy", interrupting) == (0, "")
    finally:
        signal.signal(signal.SIGINT, before)
