"""Run a launcher, and wait until the ranks have also ended: until_all_end.py FOLDER LIMIT COMMAND...

FOLDER has the ranks' process ids (altered.py). After the launcher has ended, waits at most LIMIT seconds for the ranks.
Writes FOLDER/ends.json: the times at which the launcher and each rank ended, by time.time(); null for a running rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

LOOK_S = 0.1


def has_ended(pid: str) -> bool:
    try:
        return bool(pid) and psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def watch(launcher: subprocess.Popen[bytes], folder: Path, limit_s: float) -> dict[str, float | None]:
    """Return the time at which each process ended. Polls, because the ranks are not child processes."""
    ends: dict[str, float | None] = {"launcher": None}
    deadline = float("inf")
    while None in ends.values() and time.monotonic() < deadline:
        for file in folder.glob("*.pid"):
            if ends.setdefault(file.stem, None) is None and has_ended(file.read_text()):
                ends[file.stem] = time.time()
        if ends["launcher"] is None and launcher.poll() is not None:
            ends["launcher"], deadline = time.time(), time.monotonic() + limit_s
        time.sleep(LOOK_S)  # interval between polls
    return ends


def main() -> None:
    folder, limit_s, command = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    (folder / "ends.json").write_text(json.dumps(watch(launcher, folder, limit_s)))
    sys.exit(launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode)


if __name__ == "__main__":
    main()
