"""Measures time and memory of `python -m hvd_bert.timeline` on a large timeline, next to Python's json.

    python benchmarks/timeline_scan.py --out timeline_scan.json            # 2 GB, 4 ranks, 200 tensors per step
    python benchmarks/timeline_scan.py --gigabytes 0.2 --folder /scratch

Writes a timeline as Horovod does, nearly all of it on one line, and a second one of a quarter of the size. Then runs
the command on the large file and `json.load` on the small one, each in a new process, and reads their usage from the
kernel (`wait4`, as `/usr/bin/time -v`). Both files come from the page cache. They are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

from shared import REPOSITORY, markdown_table, spread

RANKS, TENSORS, FUSED = 4, 200, 20
STEP_US = 250_000
LOAD = "import json, sys; print(len(json.load(open(sys.argv[1], encoding='utf-8'))))"
ACTIVITIES = ("MEMCPY_IN_FUSION_BUFFER", "NCCL_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER")


def step_of(number: int) -> str:
    """The events of one step: the tensors of each buffer are negotiated, copied in, reduced and copied out."""
    events: list[str] = []

    def add(phase: str, time_us: int, pid: int, name: str = "", more: str = "") -> None:
        named = f', "name": "{name}"' if name else ""
        events.append(f'{{"ph": "{phase}"{named}, "ts": {time_us}, "pid": {pid}{more}}}')

    for first in range(0, TENSORS, FUSED):
        now = 5_000_000 + number * STEP_US + first * 1000
        pids = range(first + 1, first + 1 + FUSED)
        for pid in pids:
            add("B", now + pid - first, pid, "NEGOTIATE_ALLREDUCE")
        for rank in range(RANKS):
            for pid in pids:
                add("X", now + 100 + 900 * ((rank + number) % RANKS), pid, str(rank), ', "dur": 0')
        for pid in pids:
            add("E", now + 2900, pid)
        for pid in pids:
            add("B", now + 3000, pid, "ALLREDUCE")
        for at, activity in enumerate(ACTIVITIES):
            for pid in pids:
                add("B", now + 3100 + 5000 * at, pid, activity)
            for pid in pids:
                add("E", now + 8000 + 5000 * at, pid)
        for pid in pids:
            add("E", now + 18100, pid, more=', "args": {"dtype": "float32", "shape": "[768, 768]"}')
    return ",".join(events)


def write(path: Path, size: int) -> None:
    """A timeline of about `size` bytes."""
    with path.open("wb") as file:
        _write_start(file)
        number = 0
        while file.tell() < size:
            file.write((("," if number else "") + step_of(number)).encode())
            number += 1
        file.write(b"]")


def _write_start(file: BinaryIO) -> None:
    start = '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":0}},\n'
    for pid in range(1, TENSORS + 1):
        start += f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "allreduce.layer.{pid}"}}}},\n'
    file.write(start.encode())


def measured(command: list[str]) -> dict[str, float]:
    """Wall time, CPU time and peak memory of a command."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{shlex.join(command)}: status {child.returncode}")
    return {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "resident_mb": usage.ru_maxrss * 1024e-6}


def main() -> None:
    """Write the files, measure, print."""
    parser = argparse.ArgumentParser(description="Time and memory of the analysis of a large timeline.")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="Size of the large file. (default: %(default)g)")
    parser.add_argument("--repeats", type=int, default=3, help="Runs of each program. (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="Folder for the files. (default: the temporary folder)")
    parser.add_argument("--out", type=Path, help="JSON file for all figures. (default: none)")
    flags = parser.parse_args()
    size = int(flags.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        big, quarter = Path(folder) / "big.json", Path(folder) / "quarter.json"
        write(big, size)
        write(quarter, size // 4)
        commands = {
            "hvd_bert.timeline, whole file": [sys.executable, "-m", "hvd_bert.timeline", str(big), "--json"],
            "json.load, a quarter": [sys.executable, "-c", LOAD, str(quarter)],
        }
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for _ in range(flags.repeats):  # in turns, so that other load affects both
            for name, command in commands.items():
                figures[name].append(measured(command))
        sizes = {"big": big.stat().st_size, "quarter": quarter.stat().st_size}
    print(f"{sizes['big'] / 1e9:.2f} GB; Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    rows = [[name, *(spread([run[key] for run in runs]) for key in runs[0])] for name, runs in figures.items()]
    print(markdown_table(["program", "wall, s", "CPU, s", "resident, MB"], rows))
    record: dict[str, Any] = {"bytes": sizes, "runs": figures, "python": platform.python_version()}
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
