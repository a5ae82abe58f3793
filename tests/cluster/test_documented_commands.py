"""The commands of the pages that need a cluster run on this one as they are written; Slurm accepts all of sbatch's.

They run with a tiny bert-base-uncased and a few of SQuAD's questions in the hub's cache.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import documented
import pytest
from harness import HOSTS, Cluster, results
from launch import REPOSITORY

pytestmark = pytest.mark.cluster

NODES_ELSEWHERE = r"h100|--nodes=4"
# Why other commands are not run -> which. Other tests of this folder run them with other arguments.
NOT_RUN = {
    "takes minutes or hours": r"hvd-bert (bench|tune|doctor)\b|scaling\.slurm|--config sample$",
    "the reader replaces a name": r"\bib0\b|--hostfile hosts",
    "its data are not here": r"--dataset_name mnist",
    "part of a loop": r"\$seed",
    "test_strategies.py starts these agents": r"\btorchrun\b",
    "on other nodes": NODES_ELSEWHERE,
}
LAUNCHES = ("horovodrun ", "scripts/horovodrun.sh ", "srun ", "sbatch ")
ALLOCATION = "salloc --nodes=2 --ntasks-per-node=2 --gres=gpu:a100:2"


def launches() -> list[str]:
    """All commands of the pages that start ranks on the cluster."""
    pages = [*documented.GUIDES, "CONTRIBUTING.md"]
    fences = [fence for page in pages for fence in documented.fences(page) if "cluster" in fence.needs]
    return sorted({command for fence in fences for command in fence.commands if command.startswith(LAUNCHES)})


def run_here() -> list[str]:
    return [command for command in launches() if not any(re.search(each, command) for each in NOT_RUN.values())]


def test_sbatch_commands_are_accepted(cluster: Cluster) -> None:
    accepted = [command for command in launches() if command.startswith("sbatch ")]
    accepted = [command for command in accepted if not re.search(NODES_ELSEWHERE, command)]
    assert len(accepted) > 5
    for command in accepted:
        _, *words = shlex.split(command)
        cluster.on("login", ["sbatch", "--test-only", *words], REPOSITORY, timeout=60).expect(0)


def test_reasons_apply() -> None:
    for reason, pattern in NOT_RUN.items():
        assert any(re.search(pattern, command) for command in launches()), reason
    assert f"{ALLOCATION}\n" in documented.text_of("docs/guides/cluster.md")


@pytest.fixture(scope="module")
def finished(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, hub_home: Path
) -> dict[str, tuple[dict[str, Any], Path]]:
    """Command -> train_results.json and output folder of its run; each command has a folder of its own.

    They find model and data in `hub_home`, which is their HF_HOME.
    """
    folders: dict[str, Path] = {}
    for number, command in enumerate(run_here()):
        folders[command] = tmp_path_factory.mktemp(f"clone{number}-")
        for name in ("hvd_bert", "scripts"):
            (folders[command] / name).symlink_to(REPOSITORY / name)
    jobs = [
        cluster.submit(shlex.split(command)[1:], folder)
        for command, folder in folders.items()
        if command.startswith("sbatch ")
    ]
    for command, folder in folders.items():
        words = shlex.split(command)
        if words[0] == "srun":
            words = [*shlex.split(ALLOCATION), *words]
        if words[0] != "sbatch":
            cluster.on("a100-01", words, folder).expect(0)
    for job in jobs:
        cluster.ended(job).expect(0)
    return {command: result_in(folder) for command, folder in folders.items()}


def result_in(folder: Path) -> tuple[dict[str, Any], Path]:
    (output_dir,) = (folder / "runs").iterdir()
    return results(output_dir), output_dir


def value_of(flag: str, words: Sequence[str], default: str) -> str:
    return next((word.split("=", 1)[1] for word in words if word.startswith(f"{flag}=")), default)


@pytest.mark.parametrize("command", run_here())
def test_command_runs(finished: dict[str, tuple[dict[str, Any], Path]], command: str) -> None:
    found, output_dir = finished[command]
    words = shlex.split(command)
    one_host = "localhost:2" in words or value_of("--nodes", words, "2") == "1"
    assert len(found["hosts"]) == (1 if one_host else 2)
    assert set(found["hosts"]) <= {*HOSTS}
    assert found["world_size"] == (2 if one_host else 4)
    if "--max_steps" in words:
        assert found["train_steps"] == int(words[words.index("--max_steps") + 1])
    else:
        assert found["train_windows"] == 40
        assert len(json.loads((output_dir / "eval_predictions.json").read_text())) == 5
    assert found["strategy"] == (words[words.index("--strategy") + 1] if "--strategy" in words else "horovod")


def test_results_of_a_run_without_flags(finished: dict[str, tuple[dict[str, Any], Path]]) -> None:
    for command in ("horovodrun -np 4 -H a100-01:2,a100-02:2 python -m hvd_bert.train", "sbatch scripts/hvd.slurm"):
        found, _ = finished[command]
        assert (found["train_windows"], found["train_steps"], found["hosts"]) == (40, 6, HOSTS)
