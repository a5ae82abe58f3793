"""Messages, commands and their log, for build_horovod.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

PIP = (sys.executable, "-m", "pip")


def say(text: str) -> None:
    print(f"build_horovod: {text}", flush=True)


def warn(text: str) -> None:
    print(f"build_horovod: warning: {text}", file=sys.stderr, flush=True)


def fail(problem: str, *advice: str) -> NoReturn:
    sys.stdout.flush()
    sys.exit("\n  ".join([f"build_horovod: error: {problem}", *advice]))


def output(*command: str | Path) -> str:
    """What a program prints, or '' if it fails or is not there."""
    try:
        return subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, errors="replace", check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


class Log:
    """The output of commands. A failed one ends the program with the last lines and the first errors."""

    def __init__(self, path: Path, head: str = "") -> None:
        self.path = path
        path.write_text(head)

    def run(self, *command: str | Path, env: dict[str, str] | None = None, stdin: str = "") -> None:
        words = [str(word) for word in command]
        with self.path.open("a") as file:
            done = subprocess.run(words, env=env, input=stdin, text=True, stdout=file, stderr=file, check=False)
        if done.returncode == 0:
            return
        lines = self.path.read_text(errors="replace").splitlines()
        errors = [number for number, line in enumerate(lines) if re.search("CMake Error|[Ee]rror: |fatal", line)]
        print(*lines[-20:], sep="\n", file=sys.stderr)
        print("The first errors in the log:", file=sys.stderr)
        for number in errors[:5]:
            print(*lines[number : number + 4], sep="\n", file=sys.stderr)
        fail(f"this command failed, and above are the last lines and the first errors of {self.path}:", " ".join(words))
