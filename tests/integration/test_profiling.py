"""Recordings of real runs: Horovod's timeline with its analysis, and a trace per rank."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import stopping_at
from commands import TINY, printed, read_lines, small_run
from launch import TRAIN, launcher, run

from hvd_bert.tools.timeline.findings import read

pytestmark = pytest.mark.integration

STEPS = 6  # as in small_run
PARAMETERS = 16 * TINY["num_hidden_layers"] + 5 + 2  # tensors of the layers, the embeddings and the span head


def timeline(path: Path) -> tuple[list[dict[str, Any]], Counter[int]]:
    """Parse a complete timeline. Returns its events, and count -> number of tensors with this count of allreduces."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    sends = Counter(event["pid"] for event in events if event.get("name") == "ALLREDUCE")
    return events, Counter(sends.values())


def test_steps_3_to_5_are_recorded(tmp_path: Path) -> None:
    out, path = tmp_path / "out", tmp_path / "timeline.json"
    flags = ["--timeline_file", path, "--timeline_steps", "3:5", "--profile"]
    outcome = run([*launcher(2, "gloo"), *small_run(2, out, *flags)], tmp_path).expect(0)
    assert printed(outcome).count(f"Horovod's timeline of steps 3 to 5: {path}") == 1
    assert len([row for row in read_lines(out / "metrics.jsonl") if "loss" in row]) == 6
    events, rounds = timeline(path)
    assert rounds[3] >= PARAMETERS  # gradients, and the votes on stopping
    assert {event["name"] for event in events if event["ph"] == "X"} == {"0", "1"}

    for rank in (0, 1):
        trace = json.loads(gzip.decompress((out / "trace" / f"rank-{rank}.json.gz").read_bytes()))
        assert trace["distributedInfo"] == {"rank": rank, "world_size": 2}
        spans = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
        steps = [name for name in spans if name.startswith("ProfilerStep#")]
        assert len(steps) == 3 and {"data", "compute", "exposed_comm", "optimizer"} <= spans.keys()
        assert any("autograd::engine" in name for name in spans)


def test_an_interrupted_recording_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    words = small_run(2, "out", "--timeline", path, "--timeline_steps", "2:6")[len(TRAIN) :]
    stopping = [TRAIN[0], stopping_at.__file__, "4", "1", "SIGTERM", "start"]
    stopped = run([*launcher(2, "mpirun"), *stopping, *words], tmp_path)
    assert not stopped.hung and stopped.status != 0, stopped
    assert printed(stopped).count("The recording of steps 2:6 is incomplete") == 1, stopped
    _, rounds = timeline(path)
    assert max(rounds) == 3  # in the steps 2, 3 and 4
    assert read(path).step is not None


def analysis(path: Path) -> dict[str, Any]:
    page = str(path.with_suffix(".html"))
    command = [sys.executable, "-m", "hvd_bert.tools.timeline", str(path), "--json", "--overwrite", "--html", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""  # no progress bar
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.mark.parametrize(("by", "cached"), [("mpi", False), ("gloo", True)])
def test_a_real_timeline(tmp_path: Path, by: str, cached: bool) -> None:
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path)} | ({} if cached else {"HOROVOD_CACHE_CAPACITY": "0"})
    run([*launcher(2, by), *small_run(2, tmp_path / "out")], tmp_path, env=env).expect(0)
    seen = analysis(path)
    assert seen["ranks"] == 2
    assert not seen["cut_short"]
    phases = {phase["name"]: phase for phase in seen["phases"]}
    assert {"NEGOTIATE_ALLREDUCE", "NEGOTIATE_BROADCAST", f"{by.upper()}_ALLREDUCE"} <= phases.keys()
    assert phases["NEGOTIATE_ALLREDUCE"]["count"] >= STEPS * PARAMETERS
    assert all(0 <= phase["share"] <= 1 for phase in seen["phases"])
    step = seen["step"]
    assert step["steps"] == STEPS - 1
    assert 0 <= step["exposed_least_s"] <= step["exposed_most_s"] <= step["busy_s"]
    sent = sum(row["size"] for row in seen["sizes"])  # the gradients, and sums for the log
    assert STEPS * step["size"] <= sent < 1.01 * STEPS * step["size"]
    assert [row["rank"] for row in seen["rank_rows"]] == [0, 1]
    known = seen["rank_rows"][0]["of_steps"]
    assert known == (0 if cached else STEPS - 1)
    assert (seen["naming_ranks"] < seen["negotiations"]) == cached
    assert seen["advice"]
    page = path.with_suffix(".html").read_text()
    assert all(line.split(".")[0][:30] in page for line in seen["advice"])

    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4 - 7])
    cut = analysis(path)
    assert cut["cut_short"]
    assert STEPS / 2 - 1 <= cut["step"]["steps"] < STEPS
