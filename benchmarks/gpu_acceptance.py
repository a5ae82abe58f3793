"""Checks and measures this package on the GPUs of this machine, in at most 20 minutes and without a network.

    bash scripts/gpu_acceptance.sh                 sets up, then runs this program
    python benchmarks/gpu_acceptance.py --out DIR

Prints a line per check as it ends, then all as one Markdown table, and writes DIR/gpu_acceptance.json with hardware and
versions. A check that fails does not keep the others from running. `--device cpu` runs, at small sizes and without
goals for speed, what needs no GPU. docs/evidence/gpu-acceptance.md describes the checks. This process itself never uses
a GPU, so that the commands run in compute mode Exclusive_Process, too.

Exit status: 0 if no check failed, 1 if one did or ran out of time, 2 bad input, 3 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import acceptance_attention
import acceptance_horovod
import acceptance_speed
import acceptance_training
import torch
from acceptance_place import NotHere, Outcome, OutOfTime, Place
from shared import end, machine, make_folder, markdown_table

from hvd_bert.config.parser import Limits, Parser, add_number
from hvd_bert.errors import EXIT_FAILURE, EXIT_OK
from hvd_bert.monitoring.usage import NvmlError
from hvd_bert.tools.doctor import probes

EXIT_NO_GPU = 3
GPU_NAMES = (
    "import json, torch as t; print(json.dumps([t.cuda.get_device_name(i) for i in range(t.cuda.device_count())]))"
)
NAMES_S = 120.0  # a limit: the first use of a GPU after a start of the machine is slow
PASSED, FAILED, REPORTED, NOT_HERE, LATE = "pass", "FAIL", "-", "not here", "out of time"
Checks = Mapping[str, tuple[str, Callable[[Place], Outcome]]]


@dataclass(frozen=True)
class Line:
    """A line of the table. `result`: PASSED, FAILED, REPORTED (no goal on this machine), NOT_HERE or LATE."""

    check: str
    goal: str
    found: str
    result: str
    seconds: float
    figures: dict[str, Any]


def all_checks() -> Checks:
    """In their order: what is fast and tells most comes first."""
    fast = acceptance_attention.CHECKS | acceptance_horovod.CHECKS
    speeds = acceptance_speed.checks()
    return fast | acceptance_training.CHECKS | speeds


def run_check(name: str, goal: str, check: Callable[[Place], Outcome], place: Place) -> Line:
    """Whatever a check raises is its result."""
    start = time.monotonic()
    figures: dict[str, Any] = {}
    try:
        outcome = check(place)
        found, figures = outcome.found, outcome.figures
        result = REPORTED if outcome.passed is None else PASSED if outcome.passed else FAILED
    except (NotHere, OutOfTime) as reason:
        found, result = str(reason), NOT_HERE if isinstance(reason, NotHere) else LATE
    except Exception as error:
        # The last line says most: the others are the end of a log, which the JSON file has.
        text = str(error).strip()
        reason_line = next((line for line in reversed(text.splitlines()) if "rror" in line), text[-200:])
        found, result = f"{type(error).__name__}: {reason_line.strip()[:200]}", FAILED
        figures = {"error": text}
    return Line(name, goal, found, result, time.monotonic() - start, figures)


def gpu_names(limit_s: float) -> tuple[list[str], str]:
    """The GPUs that torch has, asked in another process, or why it cannot use them."""
    words = [sys.executable, "-c", GPU_NAMES]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return [], f"no answer of the GPU after {limit_s:.0f} s"
    if done.returncode:
        return [], (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def driver() -> str:
    """The version of the GPUs' driver and their number, or why there is none."""
    gpus = probes.gpus()
    return f"no driver: {gpus}" if isinstance(gpus, NvmlError) else f"driver {gpus.driver}, {len(gpus.names)} GPU(s)"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Check and measure this package on this machine's GPUs.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/gpu_acceptance"), help="New folder. (default: %(default)s)")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    minutes = "Time for all checks. The command that then runs is terminated."
    add_number(parser, "--minutes", 20.0, minutes, Limits(above=0), "M")
    rounds = "Most rounds of the measurements in turns. (default: 3, on the CPU 1)"
    add_number(parser, "--rounds", None, rounds, Limits(minimum=1))
    add("--only", nargs="+", metavar="WORD", help="Only checks with one of these words in their names. (default: all)")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.device == "cuda" else 1)
    return args


def main(argv: Sequence[str] | None = None, checks: Checks | None = None) -> int:
    """Run the checks, print, write. Returns the exit status."""
    args, start = parse(argv), time.monotonic()
    names: list[str] = []
    if args.device == "cuda":
        names, error = gpu_names(min(NAMES_S, 60 * args.minutes))
        if not names:
            found = f"cannot use it: {error}" if error else "sees none here"
            found = f"torch {torch.__version__} (CUDA {torch.version.cuda}) {found} ({driver()})"
            print(f"gpu_acceptance: no GPU: {found}. --device cpu checks what needs none.", file=sys.stderr)
            return EXIT_NO_GPU
    out = make_folder(args.out.resolve())
    place = Place(args.device, len(names), "".join(names[:1]), out, start + 60 * args.minutes, args.rounds)
    lines = []
    for name, (goal, check) in (all_checks() if checks is None else checks).items():
        if not args.only or any(word in name for word in args.only):
            lines.append(run_check(name, goal, check, place))
            print(f"{lines[-1].result:11} {name}: {lines[-1].found}", file=sys.stderr, flush=True)
    gpu = {"gpus": names, "driver": driver(), "cuda_of_torch": torch.version.cuda}
    if names:
        gpu["nccl_of_torch"] = ".".join(map(str, torch.cuda.nccl.version()))
    record = {"command": shlex.join(sys.orig_argv), "device": args.device, "gpu": gpu, **machine()}
    record |= {"lines": [asdict(line) for line in lines]}
    (out / "gpu_acceptance.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    rows = [[r.check, r.goal, r.found.replace("|", "\\|"), r.result, f"{r.seconds:.0f}"] for r in lines]
    print(markdown_table(["check", "goal", "found", "result", "s"], rows))
    failed, late = (sum(line.result == result for line in lines) for result in (FAILED, LATE))
    said = f"{failed} of {len(lines)} checks failed" + (f", {late} ran out of time (--minutes)" if late else "")
    print(f"\n{said}. Details: {out}/gpu_acceptance.json, and a log of each command.")
    return EXIT_FAILURE if failed or late else EXIT_OK


if __name__ == "__main__":
    end(main)
