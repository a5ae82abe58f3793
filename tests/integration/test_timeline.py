"""Real timelines of 2 ranks, analyzed by the real command: complete and cut, with and without the response cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, small_run
from launch import launcher, run

pytestmark = pytest.mark.integration

STEPS = 6  # of small_run
PARAMETERS = 16 * TINY["num_hidden_layers"] + 5 + 2  # layers, embeddings, span head


def analysed(path: Path) -> dict[str, Any]:
    page = str(path.with_suffix(".html"))
    command = [sys.executable, "-m", "hvd_bert.tools.timeline", str(path), "--json", "--overwrite", "--html", page]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""  # no progress bar without a terminal
    record: dict[str, Any] = json.loads(done.stdout)
    return record


@pytest.mark.parametrize(("by", "cached"), [("mpi", False), ("gloo", True)])
def test_a_real_timeline(tmp_path: Path, by: str, cached: bool) -> None:
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path)} | ({} if cached else {"HOROVOD_CACHE_CAPACITY": "0"})
    run([*launcher(2, by), *small_run(2, tmp_path / "out")], tmp_path, env=env).expect(0)
    seen = analysed(path)
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
    cut = analysed(path)
    assert cut["cut_short"]
    assert STEPS / 2 - 1 <= cut["step"]["steps"] < STEPS
