"""scripts/hvd.slurm on real Slurm, with a shell script in place of the trainer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import documented
import pytest
from harness import FOLDER, JOB_SCRIPT, Cluster
from launch import programs

pytestmark = pytest.mark.cluster
Pretended = Callable[[str], dict[str, str]]

# Each rank prints one line in a single write, so that the ranks' lines do not mix.
SAY = r"""
printf '%s\n' "rank ${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID} on $(hostname), PMI of ${PMI_SIZE:-none},\
 cpus ${SLURM_CPUS_PER_TASK:-none}, arguments:$(printf ' <%s>' "$@")"
"""
COMMENTED = {
    "pmix": "srun --mpi=pmix",
    "pmi2": "srun --mpi=pmi2",
    "none": "srun --mpi=none",
    "mpirun": 'exec mpirun --map-by "ppr:$SLURM_NTASKS_PER_NODE:node" --bind-to none',
}


def script_by(launcher: str, folder: Path) -> Path:
    """Write a copy of the job script that uses a launcher commented out in the original. Returns its path."""
    text = JOB_SCRIPT.read_text()
    assert f"# {COMMENTED[launcher]} " in text
    command = text[text.index("srun --mpi=pmix") : text.index("python -m")]
    if launcher == "mpirun":
        text = text.replace(command, f"{COMMENTED[launcher]} ").replace("--signal=", "--signal=B:")
    else:
        text = text.replace(command, command.replace(COMMENTED["pmix"], COMMENTED[launcher]))
    (folder / JOB_SCRIPT.name).write_text(text)
    return folder / JOB_SCRIPT.name


def by_launcher(launcher: str, folder: Path, flags: str, env: dict[str, str]) -> tuple[str, Path, dict[str, str]]:
    """Return the arguments of `Cluster.submit` for a job of one rank per node, or of two by the documented torchrun.

    `env`: the environment of the fixture `altered`, with more variables. Without PMI, the strategy is ddp.
    """
    if launcher != "torchrun":
        flags += " --strategy ddp" if launcher == "none" else ""
        return f"--ntasks-per-node=1 {script_by(launcher, folder)} {flags}", folder, env
    (text,) = [fence.content for fence in documented.fences("docs/guides/cluster.md") if "torchrun" in fence.content]
    train = f"-m altered -m hvd_bert.train {flags} --per_device_train_batch_size 8 "
    assert text.count("-m hvd_bert.train ") == 1
    (folder / "torchrun.slurm").write_text(text.replace("-m hvd_bert.train ", train))
    (folder / "altered.py").symlink_to(FOLDER / "altered.py")
    (folder / ".venv").symlink_to(programs().parent)
    return (
        "torchrun.slurm",
        folder,
        {name: value for name, value in env.items() if name not in ("HVD_BERT_VENV", "PATH")},
    )


@pytest.mark.parametrize("options", [[], ["--export=NONE"]], ids=["", "export"])
def test_arguments_and_environment(cluster: Cluster, tmp_path: Path, pretended: Pretended, options: list[str]) -> None:
    (tmp_path / ".venv").symlink_to(pretended(SAY)["HVD_BERT_VENV"])
    words = [*options, str(JOB_SCRIPT), "--model_name_or_path", "my model", "--lr*", "$HOME"]
    job = cluster.submit(words, tmp_path, {"HVD_BERT_VENV": None})
    ended = cluster.ended(job).expect(0)
    given = f"<-m> <hvd_bert.train> <--output_dir> <runs/hvd_bert-{job}> <--model_name_or_path> <my model> <--lr*>"
    seen = f"PMI of none, cpus 32, arguments: {given} <$HOME>"
    assert sorted(ended.out.splitlines()) == [f"rank {n} on a100-0{1 + n // 2}, {seen}" for n in range(4)], ended
    assert ended.err == "", ended


def test_nodes_without_gpus_and_three_tasks_each(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    options = "--gres=none --nodes=2 --ntasks-per-node=3 --cpus-per-task=2 --job-name=mine"
    ended = cluster.ended(cluster.submit(f"{options} {JOB_SCRIPT} --output-dir=out", tmp_path, pretended(SAY)))
    hosts = Counter(re.findall(r"^rank \d+ on (\S+),.* <--output-dir=out>$", ended.expect(0).out, re.M))
    assert hosts == {"a100-01": 3, "a100-02": 3}, ended
    assert (tmp_path / f"mine-{ended.id}.out").exists()


@pytest.mark.parametrize("launcher", ["pmi2", "none", "mpirun"])
def test_commented_launchers(cluster: Cluster, tmp_path: Path, pretended: Pretended, launcher: str) -> None:
    ended = cluster.ended(cluster.submit([str(script_by(launcher, tmp_path))], tmp_path, pretended(SAY))).expect(0)
    hosts = dict(re.findall(r"^rank (\d) on (\S+),", ended.out, re.M))
    assert hosts == {"0": "a100-01", "1": "a100-01", "2": "a100-02", "3": "a100-02"}, ended
    assert ended.out.count("PMI of 4") == (4 if launcher == "pmi2" else 0), ended


def test_job_fails_with_a_rank(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    ended = cluster.ended(cluster.submit([str(JOB_SCRIPT)], tmp_path, pretended('[ "$SLURM_PROCID" != 3 ] || exit 7')))
    assert (ended.state, ended.status != 0) == ("FAILED", True), ended  # 7, or 143 if a rank was terminated by srun
    assert "srun: error: a100-02: task 3: Exited with exit code 7" in ended.err, ended


def test_other_folder_than_the_clone(cluster: Cluster, tmp_path: Path) -> None:
    ended = cluster.ended(cluster.submit([str(JOB_SCRIPT)], tmp_path, {"HVD_BERT_VENV": None})).expect(2)
    assert ended.err.count("\n") == 1 and f"no .venv in {tmp_path}" in ended.err, ended


def test_inside_salloc(cluster: Cluster, tmp_path: Path, pretended: Pretended) -> None:
    command = ["salloc", "--nodes=2", "--ntasks-per-node=1", "bash", str(JOB_SCRIPT)]
    outcome = cluster.on("a100-01", command, tmp_path, pretended(SAY)).expect(0)
    assert outcome.output.count("> <--output_dir> <runs/") == 2, outcome


@pytest.mark.parametrize("name", ["hvd.slurm", "scaling.slurm"])
def test_help_prints_the_head(name: str, cluster: Cluster, tmp_path: Path) -> None:
    script = JOB_SCRIPT.with_name(name)
    lines = script.read_text().splitlines()
    outcome = cluster.on("login", ["bash", str(script), "--help"], tmp_path).expect(0)
    assert outcome.output.splitlines() == lines[1 : lines.index("#SBATCH --output=%x-%j.out --error=%x-%j.err") + 1]
    assert len(lines) <= 40
