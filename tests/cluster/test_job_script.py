"""scripts/hvd.slurm on real Slurm, with a shell script in place of the trainer."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import JOB_SCRIPT, REPOSITORY, Cluster

pytestmark = pytest.mark.cluster
Pretended = Callable[[str], dict[str, str]]

# One line per rank, in one write, so that lines do not mix.
SAY = r"""
printf '%s\n' "rank ${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID} on $(hostname), threads $OMP_NUM_THREADS,\
 interface ${HVD_BERT_INTERFACE:-none}, site ${OF_SITE:-none}, arguments:$(printf ' <%s>' "$@")"
"""


def test_arguments_threads_interface_and_site(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    (tmp_path / "site.sh").write_text("export OF_SITE=here HVD_BERT_INTERFACE=eth0\nfalse\n: $UNSET\n")
    env = pretended(SAY) | {"HVD_BERT_SITE": str(tmp_path / "site.sh"), "OMP_NUM_THREADS": "3"}
    job = cluster.submit([str(JOB_SCRIPT), "--model_name_or_path", "my model", "--lr*", "$HOME"], tmp_path, env)
    ended = cluster.ended(job).expect(0)
    given = "<-m> <hvd_bert.train> <--model_name_or_path> <my model> <--lr*> <$HOME> <--output_dir>"
    seen = f"threads 3, interface eth0, site here, arguments: {given} <runs/hvd_bert-{job}>"
    expected = [f"rank {rank} on a100-0{1 + rank // 2}, {seen}" for rank in range(4)]
    assert sorted(line for line in ended.out.splitlines() if line.startswith("rank")) == expected, ended
    assert ended.err == "", ended
    assert re.search(rf"^hvd.slurm: job {job} on a100-\[01-02\], attempt 1, {REPOSITORY}, ", ended.out, re.M), ended


def test_nodes_without_gpus_and_three_tasks_each(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    options = "--gres=none --nodes=2 --ntasks-per-node=3 --cpus-per-task=2 --job-name=mine"
    ended = cluster.ended(cluster.submit(f"{options} {JOB_SCRIPT} --output-dir=out", tmp_path, pretended(SAY)))
    hosts = Counter(re.findall(r"^rank \d+ on (\S+),.* <--output-dir=out>$", ended.expect(0).out, re.M))
    assert hosts == {"a100-01": 3, "a100-02": 3}, ended
    assert (tmp_path / f"mine-{ended.id}.out").exists()


def test_job_has_the_trainers_status(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    script = '[ "$SLURM_PROCID" != 3 ] || exit 7'
    ended = cluster.ended(cluster.submit([str(JOB_SCRIPT)], tmp_path, pretended(script))).expect(7)
    assert "srun: error: a100-02: task 3: Exited with exit code 7" in ended.err, ended
    assert "hvd.slurm: pmix ended with status " in ended.out, ended  # 7, or 143 of a rank that srun then terminated


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HVD_BERT_INTERFACE": "ib7"}, ["HVD_BERT_INTERFACE=ib7: no such interface", "eth0", "a100-0"]),
        ({"HVD_BERT_INTERFACE": "10.99.0.0/16"}, ["10.99.0.0/16: no interface in this subnet", "eth0 10.77.0.1"]),
        ({"HVD_BERT_SITE": "/nowhere/site.sh"}, ["HVD_BERT_SITE: no such file: /nowhere/site.sh"]),
        ({"HVD_BERT_VENV": "/nowhere"}, ["no environment in /nowhere", "env/setup.sh"]),
        ({"HVD_BERT_LAUNCHER": "mpiexec"}, ["HVD_BERT_LAUNCHER=mpiexec", "pmix, pmi2 or mpirun"]),
    ],
    ids=["interface", "subnet", "site", "venv", "launcher"],
)
def test_invalid_settings_are_reported(
    cluster: Cluster, tmp_path: Path, pretended: Pretended, env: dict[str, str], words: list[str]
) -> None:
    ended = cluster.ended(cluster.submit([str(JOB_SCRIPT)], tmp_path, pretended(SAY) | env)).expect(2)
    assert [word for word in words if word not in ended.err] == [], ended
    assert "rank " not in ended.out, ended


def test_environment_missing_on_one_node(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    # On a disk of the first node only, not on a shared file system.
    env = pretended(SAY) | {"HVD_BERT_VENV": str(cluster.local / "venv")}
    copy = f"mkdir {cluster.local}/venv && cp -r {tmp_path}/pretended/bin {cluster.local}/venv"
    cluster.on("a100-01", ["sh", "-c", copy], tmp_path, timeout=60).expect(0)
    ended = cluster.ended(cluster.submit([str(JOB_SCRIPT)], tmp_path, env)).expect(2)
    assert "a100-02: no " in ended.err and "on a shared file system" in ended.err, ended
    assert "a100-01: no " not in ended.err, ended


@pytest.mark.parametrize(
    ("offers", "speaks", "launcher", "command"),
    [
        ("none pmi2", "mca:pmix:s2:version", "pmi2", "srun --mpi=pmi2 --kill-on-bad-exit=1 --wait=60 "),
        ("none pmi2", "mca:pmix:ext3x:version", "mpirun", "mpirun -np 4 "),
        ("none", "mca:pmix:s2:version", "mpirun", "mpirun -np 4 "),
    ],
    ids=["pmi2", "an MPI without pmi2", "neither"],
)
def test_without_pmix(
    cluster: Cluster, tmp_path: Path, pretended: Pretended, offers: str, speaks: str, launcher: str, command: str
) -> None:
    # A site without PMIx: these programs answer with `offers` and `speaks`, and otherwise run the real ones.
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, asked, answer in (("srun", "--mpi=list", offers), ("ompi_info", "--parsable", speaks)):
        real = f'exec {shutil.which(name)} "$@"'
        (folder / name).write_text(f'#!/bin/sh\nif [ "$1" = {asked} ]; then echo "{answer}"; else {real}; fi\n')
        (folder / name).chmod(0o755)
    (tmp_path / "site.sh").write_text(f"PATH={folder}:$PATH\n")
    script = f'echo "PMI of ${{PMI_SIZE:-none}}"\n{SAY}'
    env = pretended(script) | {"HVD_BERT_SITE": str(tmp_path / "site.sh")}
    ended = cluster.ended(cluster.submit([str(JOB_SCRIPT)], tmp_path, env)).expect(0)
    assert f"hvd.slurm: this Slurm has no PMIx: starting with {launcher}\nhvd.slurm: {command}" in ended.out, ended
    hosts = dict(re.findall(r"^rank (\d) on (\S+),", ended.out, re.M))
    assert hosts == {"0": "a100-01", "1": "a100-01", "2": "a100-02", "3": "a100-02"}, ended
    assert ended.out.count("PMI of 4") == (4 if launcher == "pmi2" else 0), ended
