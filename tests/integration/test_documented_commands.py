"""The commands of the README, the quick start and the guides run as written.

They run in a folder with all files that the pages name: scripts, examples, a tiny bert-base-uncased, a few questions in
the hub's cache and in files, and a sweep's finished runs. Marks in the pages exempt commands that take long or need
hosts. tests/unit/test_documented_commands.py checks the arguments of all commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import documented
import pytest
from documented import Fence
from launch import REPOSITORY, built, run
from made_runs import make_run

pytestmark = pytest.mark.integration

# KEY of `<!-- needs: KEY -->` above a fence -> pattern of the fence's commands that are not run.
NEEDS = {
    "cluster": r"(for|done|s(alloc|batch|info|run))\b|.*(a100-\d|--host(file|-discovery)|tests/cluster|cluster_pack)",
    "containers": r"(docker|apptainer|enroot|srun (--\S+ )+(apptainer|python|hvd-bert)) ",
    "cores": r"mpirun -np 4",
    "model": r".*export_onnx",  # tests/unit/test_card.py runs it
    "names": r".*( \.\.\.|[A-Z]{4}\.\.\.|/scratch/)",  # the reader replaces these names
    "ray": r".*ray_train",  # test_programs.py runs it
    "server": r"tensorboard|hf upload\b|.*answer_server|curl ",  # test_programs.py starts the server
    # test_custom_task.py and tests/parallel train examples/mnist_rnn.py, tests/parallel examples/distillation.py.
    "time": r".*(hvd-bert (bench|tune)\b|benchmarks/|(scripts/(demo|test)|env/setup)\.sh|--config sample\b|mnist_rnn"
    r"|distillation|runs/student|pip install \.)",
}
PREPARES = ("source ", "export ")


def runs_here(fence: Fence) -> list[str]:
    """Return the commands of a fence, except those that a mark exempts."""
    exempt = [re.compile(NEEDS[need]) for need in fence.needs]
    return [command for command in fence.commands if not any(pattern.match(command) for pattern in exempt)]


def prepares_only(commands: Sequence[str]) -> bool:
    return all(command.startswith(PREPARES) for command in commands)


class Clone:
    """A folder like a clone, in which commands run. `done`: the commands that have run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: set[str] = set()
        self.environ = {"HVD_BERT_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}

    def run(self, commands: Sequence[str]) -> None:
        """Run the commands that have not run yet, and all `source` and `export` commands, in one shell.

        Fails the test if a command fails.
        """
        new = [command for command in commands if command.startswith(PREPARES) or command not in self.done]
        if not prepares_only(new):
            script = ["bash", "-euxo", "pipefail", "-c", "\n".join(new)]
            run(script, self.folder, env=self.environ).expect(0)
        self.done.update(new)


@pytest.fixture(scope="module")
def clone(
    tmp_path_factory: pytest.TempPathFactory,
    hub_home: Path,
    make_questions: Callable[..., Any],
    to_squad: Callable[..., Any],
) -> Clone:
    if not built() >= {"mpi", "gloo"}:
        pytest.skip("the commands need a Horovod with MPI and Gloo")
    folder = tmp_path_factory.mktemp("clone")
    for name in ("env", "examples", "hvd_bert", "scripts"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    files = {
        "train-v1.1": slice(32),
        "dev-v1.1": slice(5),
        "mine": slice(16),
        "held-out": slice(16, 20),
        "dev.de": slice(20, 24),
    }
    for name, part in files.items():
        (folder / f"{name}.json").write_text(json.dumps(to_squad(make_questions(32)[part])))
    for name, count in (("train.jsonl", 16), ("dev.jsonl", 4)):
        rows = [{"sentence": f"The box {n} is red.", "label": n % 2} for n in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"question": question.question, "context": question.context} for question in make_questions(2)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "images.jsonl").write_text(json.dumps({"pixels": [0] * 64}) + "\n")
    (folder / "digits.py").write_text(documented.custom_task())
    (folder / "models").mkdir()
    (snapshot,) = (hub_home / "hub" / "models--bert-base-uncased" / "snapshots").iterdir()
    (folder / "models" / "bert-base-uncased").symlink_to(snapshot)
    for strategy, ranks in (("none", 1), ("horovod", 2)):
        make_run(folder / "runs" / "sweep" / f"{strategy}-{ranks}-strong-1", strategy, ranks)
    return Clone(folder)


@pytest.mark.parametrize("page", documented.GUIDES)
def test_every_mark_is_needed(page: str) -> None:
    for fence in documented.fences(page):
        for need in fence.needs:
            assert any(re.match(NEEDS[need], command) for command in fence.commands), f"{fence} does not need {need}"


@pytest.mark.parametrize(
    "page",
    [page for page in documented.GUIDES if not all(prepares_only(runs_here(f)) for f in documented.fences(page))],
)
def test_commands_run(page: str, clone: Clone) -> None:
    for fence in documented.fences(page):
        clone.run(runs_here(fence))
