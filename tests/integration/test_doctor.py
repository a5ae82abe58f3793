"""Run `hvd-bert doctor` alone and under launchers."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from commands import printed, read_report
from documented import undocumented
from launch import built, launcher, run

pytestmark = pytest.mark.integration

DOCTOR = [sys.executable, "-m", "hvd_bert.tools.doctor"]


def test_alone(tmp_path: Path) -> None:
    outcome = run([*DOCTOR, "--verbose"], tmp_path).expect(0)
    names = set(re.findall(r"^  (?:ok|warning) +(\S+) ", outcome.output, re.MULTILINE))
    assert names >= {"Python", "torch", "Packages", "Horovod", "MPI", "Slurm", "Windows", "Memory", "Output", "World"}
    assert "failure" not in outcome.output and list(tmp_path.iterdir()) == []


def test_the_printed_command_starts_a_training(tmp_path: Path) -> None:
    outcome = run(DOCTOR, tmp_path).expect(0)
    assert outcome.output.startswith("Ready: a training would start here") and "  ok " not in outcome.output, outcome
    line = next(line for line in outcome.output.splitlines() if "horovodrun -np" in line)
    run(["bash", "-c", f"{line} --max_steps 2 --output_dir out"], tmp_path).expect(0)
    assert json.loads((tmp_path / "out" / "train_results.json").read_text())["world_size"] > 1


@pytest.mark.parametrize(("flags", "times"), [([], 0), (["--verbose"], 2)])
def test_two_ranks_in_a_text(flags: list[str], times: int, tmp_path: Path) -> None:
    text = printed(run([*launcher(2, "mpi"), *DOCTOR, "--size", "1", *flags], tmp_path).expect(0))
    once = ("Ready: a training would start here", "connected through MPI", "correct sums; 1.0 MB in")
    assert [text.count(words) for words in (*once, "Horovod, MPI")] == [1, 1, 1, times], text


def test_two_ranks_as_json(tmp_path: Path) -> None:
    outcome = run([*launcher(2, "gloo"), *DOCTOR, "--size", "1", "--json"], tmp_path).expect(0)
    report = read_report(outcome)
    assert report["ready"], outcome
    assert undocumented(report, "Preflight check JSON", without=("versions", "addresses")) == []
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert {check["name"]: check["status"] for check in report["checks"]}["Versions"] == "ok"
    timed = [(timing["method"], timing["num_bytes"], len(timing["seconds"])) for timing in report["allreduce"]]
    assert timed == [("Horovod, Gloo", 1_000_000, 5), ("Horovod, Gloo", 4, 5)]
    for timing in report["allreduce"]:
        assert timing["median_s"] == sorted(timing["seconds"])[2] and timing["gb_per_s"] > 0


def test_proof(tmp_path: Path) -> None:
    report = read_report(run([*DOCTOR, "--prove", "--json", "--strategy", "none"], tmp_path).expect(0))
    assert report["ready"] and [len(step["ranks"]) for step in report["steps"]] == [1] * 5
    data = ("settings", "checks", "hashes", "errors", "figures", "bounds")
    assert undocumented(report, "Proof JSON", "train_results.json", without=data) == []


@pytest.mark.skipif("mpi" not in built(), reason="Horovod was built without MPI")
def test_worlds_of_size_1_are_refused(tmp_path: Path) -> None:
    """Two processes that another MPI's launcher has started do not join each other."""
    env = {"PMI_SIZE": "2", "PMI_RANK": "0"}
    report = read_report(run([*DOCTOR, "--json"], tmp_path, env=env).expect(2))
    failed = {check["name"]: check["found"] for check in report["checks"] if check["status"] == "failure"}
    assert list(failed) == ["World"] and "started 2 processes, but Horovod sees a world of 1" in failed["World"]
