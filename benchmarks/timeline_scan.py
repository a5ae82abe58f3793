"""How fast `python -m hvd_bert.timeline` is on a big timeline, and in how much memory; beside Python's json.

    python benchmarks/timeline_scan.py --out timeline_scan.json            # 2 GB, 4 ranks, 200 tensors a step
    python benchmarks/timeline_scan.py --gigabytes 0.2 --folder /scratch

A timeline of so many bytes is made in `--folder`, as Horovod's writer would (one line for nearly all of it), and a
second one of a quarter. Then, each in a fresh process, by what the kernel counts for it (`wait4`, as `/usr/bin/time -v`
shows): the command on the big file, and `json.load` on the quarter. Both files have just been written, so both are read
from the page cache. They are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

REPOSITORY = Path(__file__).resolve().parents[1]
RANKS, TENSORS, FUSED = 4, 200, 20
STEP_US = 250_000
LOAD = "import json, sys; print(len(json.load(open(sys.argv[1], encoding='utf-8'))))"
ACTIVITIES = ("MEMCPY_IN_FUSION_BUFFER", "NCCL_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER")


def step_of(number: int) -> str:
    """The events of one step: each buffer's tensors become ready, are copied in, allreduced, copied out."""
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
    """Wall time, processor time and the most memory of a process that must end with status 0."""
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)}: status {child.returncode}")
    return {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "resident_mb": usage.ru_maxrss * 1024e-6}


def main() -> None:
    """Make the files, measure, print, write `--out`, delete the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the big file (2)")
    parser.add_argument("--repeats", type=int, default=3, help="(3)")
    parser.add_argument("--folder", type=Path, help="where the files are made (default: the temporary folder)")
    parser.add_argument("--out", type=Path, help="every single figure, as JSON")
    flags = parser.parse_args()
    size = int(flags.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        big, quarter = Path(folder) / "big.json", Path(folder) / "quarter.json"
        write(big, size)
        write(quarter, size // 4)
        commands = {
            "hvd_bert.timeline": [sys.executable, "-m", "hvd_bert.timeline", str(big), "--json"],
            "json.load of a quarter": [sys.executable, "-c", LOAD, str(quarter)],
        }
        figures: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for _ in range(flags.repeats):  # in turn, so that a busy neighbour meets both
            for name, command in commands.items():
                figures[name].append(measured(command))
        sizes = {"big": big.stat().st_size, "quarter": quarter.stat().st_size}
    print(f"{sizes['big'] / 1e9:.2f} GB; Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    print("| | wall s | CPU s | resident MB |\n| --- | ---: | ---: | ---: |")
    for name, runs in figures.items():
        cells = [f"{min(r[key] for r in runs):.1f} to {max(r[key] for r in runs):.1f}" for key in runs[0]]
        print(f"| {name} | " + " | ".join(cells) + " |")
    record: dict[str, Any] = {"bytes": sizes, "runs": figures, "python": platform.python_version()}
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
