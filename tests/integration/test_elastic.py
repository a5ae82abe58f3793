"""Horovod elastic on this machine under two host names: a worker is killed. tests/cluster adds a host."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import stopping_at
from commands import said, small_run
from launch import Outcome, built, run
from tables import each

pytestmark = pytest.mark.integration

WINDOWS, STEPS_PER_EPOCH, HOSTS = 33, 3, ("localhost", "127.0.0.1")  # the first two of small_run


def elastic(folder: Path, stop: str) -> Outcome:
    """small_run on one rank per host, each of which has a folder of its own."""
    if "gloo" not in built():
        pytest.skip("this Horovod was built without gloo")
    (folder / "discover").write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in HOSTS))
    (folder / "discover").chmod(0o755)
    for host in HOSTS:
        (folder / host).mkdir()
    words = [Path(sys.executable).with_name("horovodrun"), "-np", 2, "--min-np", 1, "--max-np", 2]
    words += ["--host-discovery-script", folder / "discover", "--network-interfaces", "lo"]
    words += ["env", "sh", "-c", 'cd $HOROVOD_HOSTNAME && exec "$@"', "sh"]
    words += [sys.executable, stopping_at.__file__, *stop.split(), *small_run(2, "out", "--elastic")[3:]]
    return run([str(word) for word in words], folder, env={"HVD_BERT_CACHE": str(folder / "cache")})


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@each("rank", [0, 1])
def test_training_continues_without_a_killed_worker(tmp_path: Path, rank: int) -> None:
    outcome = elastic(tmp_path, f"5 {rank} SIGKILL start").expect(0)
    assert "Resuming after step 4, kept by rank 0" in said(outcome), outcome
    (results,) = tmp_path.glob("*/out/train_results.json")  # of the survivor
    result = json.loads(results.read_text())
    assert (result["world_size"], result["train_samples"]) == (1, 2 * WINDOWS)
    # The windows trained on: of both ranks up to the last finished step, then of the remaining one.
    taken = [row for path in tmp_path.glob("*/windows-*.jsonl") for row in rows(path) if row["step"] <= 4]
    taken += rows(results.parents[1] / "windows-0.jsonl")[-4:]  # two passes of two steps
    for epoch in range(2):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        seen = Counter(window for row in taken if row["step"] in steps for window in row["windows"])
        assert seen == Counter(range(WINDOWS))


def test_elastic_needs_its_launcher(tmp_path: Path) -> None:
    refused = run(small_run(1, tmp_path / "out", "--elastic"), tmp_path).expect(2)
    assert "--elastic needs Horovod's elastic launcher. Start horovodrun" in refused.output
