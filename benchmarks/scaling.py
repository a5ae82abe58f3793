"""Windows per second of N ranks over those of N single ranks that run at the same time: what working together costs.

    python benchmarks/scaling.py --ranks 2 --rounds 3 -- --model MODEL --steps 10

After `--` come flags of `python -m hvd_bert.bench`, which measures; both sides have the same threads and the same batch
per rank, and take turns. Prints the ratio's median and range.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

BENCH = [sys.executable, "-m", "hvd_bert.bench"]
REPOSITORY = Path(__file__).resolve().parents[1]


def together(ranks: int, flags: list[str], folder: Path, env: dict[str, str]) -> list[dict[str, Any]]:
    """One world of `ranks`."""
    launcher = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(ranks)]
    out = folder / "together.json"
    subprocess.run([*launcher, *BENCH, *flags, "--json", str(out)], env=env, check=True, stdout=sys.stderr)
    return [json.loads(out.read_text())]


def apart(ranks: int, flags: list[str], folder: Path, env: dict[str, str]) -> list[dict[str, Any]]:
    """As many worlds of one, at the same time."""
    outs = [folder / f"apart-{number}.json" for number in range(ranks)]
    started = [subprocess.Popen([*BENCH, *flags, "--json", str(out)], env=env, stdout=sys.stderr) for out in outs]
    if any([process.wait() for process in started]):
        raise SystemExit("a benchmark failed")
    return [json.loads(out.read_text()) for out in outs]


def rate(records: list[dict[str, Any]]) -> float:
    """Windows per second of all of them."""
    return float(sum(record["figures"]["windows_per_s"]["median"] for record in records))


def main() -> None:
    parser = argparse.ArgumentParser(description="What working together costs.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a rank")
    parser.add_argument("flags", nargs="*", help="of python -m hvd_bert.bench")
    args = parser.parse_args()
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(REPOSITORY)}
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            sides = {}
            for side in (together, apart) if number % 2 == 0 else (apart, together):
                sides[side.__name__] = side(args.ranks, args.flags, Path(folder), env)
            rounds.append({name: rate(records) for name, records in sides.items()})
            exposed = [r["figures"]["exposed_comm_share"]["median"] for r in sides["together"]]
            print(rounds[-1], "exposed communication", exposed, file=sys.stderr)
    ratios = sorted(each["together"] / each["apart"] for each in rounds)
    print(
        json.dumps({"rounds": rounds, "ratio": {"median": median(ratios), "range": [ratios[0], ratios[-1]]}}, indent=1)
    )


if __name__ == "__main__":
    main()
