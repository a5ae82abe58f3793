"""Documented commands on the test cluster: one command per way to start ranks runs, and Slurm accepts sbatch commands.

The commands run with a tiny bert-base-uncased and a few questions in the hub's cache. Slurm does not check sbatch
commands for nodes that the test cluster lacks.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import documented
import pytest
from harness import HOSTS, Cluster, results
from launch import REPOSITORY

pytestmark = pytest.mark.cluster

NODES_ELSEWHERE = r"h100|--nodes=4"
DOCTOR = "hvd-bert doctor --hosts a100-01:2,a100-02:2"
PRINTED = "horovodrun -np 4 -H a100-01:2,a100-02:2 python -m hvd_bert.train"
# One command per way to start ranks. Other tests in this folder cover the remaining ways.
RUN_HERE = (
    DOCTOR,
    "sbatch scripts/hvd.slurm",
    "srun --mpi=pmix --kill-on-bad-exit=1 --wait=60 python -m hvd_bert.train",
)
LAUNCHES = ("horovodrun ", "hvd-bert doctor --hosts ", "srun ", "sbatch ")
ALLOCATION = "salloc --nodes=2 --ntasks-per-node=2 --gres=gpu:a100:2"


def launches() -> list[str]:
    """Return all documented commands that start ranks on the cluster."""
    pages = [*documented.GUIDES, "CONTRIBUTING.md"]
    fences = [fence for page in pages for fence in documented.fences(page) if "cluster" in fence.needs]
    return sorted({command for fence in fences for command in fence.commands if command.startswith(LAUNCHES)})


def test_sbatch_commands_are_accepted(cluster: Cluster) -> None:
    accepted = [command for command in launches() if command.startswith("sbatch ")]
    accepted = [command for command in accepted if not re.search(NODES_ELSEWHERE, command)]
    assert len(accepted) > 5
    for command in accepted:
        _, *words = shlex.split(command)
        cluster.on("login", ["sbatch", "--test-only", *words], REPOSITORY, timeout=60).expect(0)


def test_commands_run(cluster: Cluster, tmp_path: Path, hub_home: Path) -> None:
    """Run each command of RUN_HERE in a separate folder. Model and data are in `hub_home`, the commands' HF_HOME."""
    assert {*RUN_HERE, PRINTED} <= set(launches())
    assert f"{ALLOCATION}\n" in documented.text_of("docs/guides/cluster.md")
    jobs = {}
    for number, command in enumerate(RUN_HERE):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("hvd_bert", "scripts"):
            (folder / name).symlink_to(REPOSITORY / name)
        program, *words = shlex.split(command)
        if command == DOCTOR:
            *_, line = cluster.on("a100-01", command, folder).expect(0).output.splitlines()
            program, *words = shlex.split(line)
            assert [Path(word).name for word in (program, *words)] == PRINTED.split()
        if program == "sbatch":
            jobs[number] = cluster.submit(words, folder)
        else:
            allocated = shlex.split(ALLOCATION) if program == "srun" else []
            cluster.on("a100-01", [*allocated, program, *words], folder).expect(0)
    for job in jobs.values():
        cluster.ended(job).expect(0)
    for number in range(len(RUN_HERE)):
        (output_dir,) = (tmp_path / str(number) / "runs").iterdir()
        found = results(output_dir)
        assert (found["hosts"], found["world_size"], found["train_windows"]) == (HOSTS, 4, 40)
        assert found["strategy"] == "horovod"
        assert len(json.loads((output_dir / "eval_predictions.json").read_text())) == 5
