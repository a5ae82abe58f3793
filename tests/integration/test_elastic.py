"""Horovod elastic on this machine under two host names: a worker is killed. tests/cluster adds a host."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import stopping_at
from commands import said, small_run
from launch import Outcome, built, run

pytestmark = pytest.mark.integration

WINDOWS, STEPS_PER_EPOCH = 33, 3  # of small_run


def elastic(folder: Path, hosts: str, np: int, *flags: object, stop: str = "0 0 SIGKILL start") -> Outcome:
    """small_run on one rank per host. `hosts`: shell code that lists them."""
    if "gloo" not in built():
        pytest.skip("this Horovod was built without gloo")
    (folder / "discover").write_text(f"#!/bin/sh\n{hosts}\n")
    (folder / "discover").chmod(0o755)
    words = [Path(sys.executable).with_name("horovodrun"), "-np", np, "--min-np", 1, "--max-np", 2]
    words += ["--host-discovery-script", folder / "discover", "--network-interfaces", "lo"]
    words += [sys.executable, stopping_at.__file__, *stop.split(), *small_run(2, folder / "out", *flags)[3:]]
    return run([str(word) for word in words], folder, env={"HVD_BERT_CACHE": str(folder / "cache")})


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_continues_without_a_killed_worker(tmp_path: Path) -> None:
    both = "echo localhost:1; echo 127.0.0.1:1"
    outcome = elastic(tmp_path, both, 2, "--elastic", "--save_steps", 2, stop="5 1 SIGKILL start").expect(0)
    assert "Joining the world of the remaining ranks" in outcome.output, outcome
    step = int(re.findall(r"Resuming from step (\d+)", said(outcome))[0])
    assert step in (2, 4), outcome
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["world_size"] == 1
    # The windows trained on: of both ranks up to the checkpoint, then of the remaining one.
    survivor = rows(tmp_path / "windows-0.jsonl")
    again = next(i for i in range(1, len(survivor)) if survivor[i]["step"] <= survivor[i - 1]["step"])
    before = [*survivor[:again], *rows(tmp_path / "windows-1.jsonl")]
    taken = [row for row in before if row["step"] <= step] + survivor[again:]
    for epoch in range(2):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        seen = Counter(window for row in taken if row["step"] in steps for window in row["windows"])
        assert seen == Counter(range(WINDOWS))


def test_elastic_needs_its_launcher_and_a_folder(tmp_path: Path) -> None:
    refused = run(small_run(1, tmp_path / "out", "--elastic"), tmp_path).expect(2)
    assert "--elastic needs Horovod's elastic launcher. Start horovodrun" in refused.output
