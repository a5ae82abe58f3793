"""Test `hvd-bert bench sweep` with real launches: it is interrupted, resumed and reported."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from documented import undocumented
from launch import TIMEOUT_S, launcher, run

pytestmark = pytest.mark.integration

# Sends SIGINT, as Ctrl-C does, once the first point is done.
INTERRUPTED = """
import signal, subprocess, sys
with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True) as sweep:
    for line in sweep.stdout:
        print(line, end="", flush=True)
        if line.startswith("[1/"):
            sweep.send_signal(signal.SIGINT)
sys.exit(sweep.returncode)
"""


def states(folder: Path) -> dict[str, str]:
    return {row["name"]: row["state"] for row in json.loads((folder / "sweep.json").read_text())["points"]}


def test_interrupted_resumed_and_reported(tmp_path: Path) -> None:
    """The sweep has one process, Horovod with an additional flag, DDP, and a strategy that cannot run here."""
    launcher(2, "gloo")  # skips the test if the launcher is missing
    words = [sys.executable, "-m", "hvd_bert.tools.bench", "sweep"]
    words += ["--strategies", "none,horovod,ddp,dp", "--ranks", "2"]
    words += ["--repeats", "1", "--steps", "2", "--global_batch", "4", "--max_train_samples", "33", "--fp16_allreduce"]
    env = {"CUDA_VISIBLE_DEVICES": ""}
    run([sys.executable, "-c", INTERRUPTED, *words], tmp_path, env=env, timeout=2 * TIMEOUT_S).expect(75)
    out = tmp_path / "runs" / "sweep"
    done = {"none-1-strong-1": "done", "dp-2-strong-1": "skipped"}
    assert states(out) == {"horovod-2-strong-1": "waiting", "ddp-2-strong-1": "waiting"} | done
    first = (out / "none-1-strong-1" / "train_results.json").stat().st_mtime_ns

    outcome = run([*words, "--report", "report"], tmp_path, env=env, timeout=3 * TIMEOUT_S).expect(1)
    assert states(out) == {"horovod-2-strong-1": "done", "ddp-2-strong-1": "done"} | done, outcome
    assert (out / "none-1-strong-1" / "train_results.json").stat().st_mtime_ns == first
    assert undocumented(json.loads((out / "sweep.json").read_text()), "sweep.json", without=("same",)) == []
    with (tmp_path / "report" / "report.csv").open(newline="") as file:
        rows = {(row["strategy"], row["ranks"]): row for row in csv.DictReader(file)}
    assert rows.keys() == {("none", "1"), ("horovod", "2"), ("ddp", "2")}
    # Rows have a speed-up only if the runs did the same work and their losses agree.
    assert all(float(row["speedup"]) > 0 for row in rows.values()), outcome
