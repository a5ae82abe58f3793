"""Start the fork server of a test session (server.py), and make the folder with its `python` (client.py)."""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
NAMES = ("python", "horovodrun", "torchrun", "hvd-bert")
LIMIT_S = 60.0


def programs(environ: Mapping[str, str]) -> Path:
    """Make a folder with `activate` and the programs NAMES, and start their server in the environment `environ`.

    Returns the folder, which is removed when this process ends.
    """
    place = Path(tempfile.mkdtemp(prefix="hvd_", dir="/tmp"))  # short, because sockets' paths are limited
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    folder = place / "bin"
    folder.mkdir()
    client = f"#!{sys.executable} -ISE\n" + (FOLDER / "client.py").read_text(encoding="utf-8")
    for name in NAMES:
        (folder / name).write_text(client, encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "activate").write_text(f"PATH={folder}:$PATH\n", encoding="utf-8")
    (folder / "server.json").write_text(
        json.dumps({"python": sys.executable, "environ": dict(environ)}), encoding="utf-8"
    )
    start(folder, environ)
    return folder


def start(folder: Path, environ: Mapping[str, str], hosts: Sequence[str] = (), pid: int = 0) -> subprocess.Popen[str]:
    """Start and return a server for the programs in `folder`. It ends with this process.

    By default, it serves this host. With `hosts` and `pid`, it serves these hosts, which are in the PID namespace of
    process `pid`. It is then itself a fork of this host's server.
    """
    first, *others = hosts or [socket.gethostname()]
    for host in others:
        (folder / host).symlink_to(first)
    python = str(folder / "python") if pid else sys.executable
    command = [python, str(FOLDER / "server.py"), str(folder / first), *([str(pid)] if pid else [])]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environ), text=True, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    atexit.register(end, process)
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    """End a server, and print whether it had ended early. No test would fail then: commands only start more slowly."""
    if process.stdin is None or process.stdin.closed:
        return
    if process.poll() is not None:
        print(f"tests/fork_server: the server ended early, with status {process.returncode}", file=sys.stderr)
    process.stdin.close()
    try:
        process.wait(LIMIT_S)
    finally:
        process.kill()
