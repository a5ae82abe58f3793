"""Mistakes of users: one message that says what and where, status 2, before any training, and never a hang."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import said, small_run
from launch import SAMPLE_DEV, launcher, run

pytestmark = pytest.mark.integration

# Name -> flags that follow those of a good run, and what the message must say. FOLDER stands for the test's.
MISTAKES: dict[str, tuple[str, list[str]]] = {
    "misplaced answer": ("--train_file FOLDER/questions.json", ["FOLDER/questions.json", "q7", "'red'", "character 3"]),
    "output folder not empty": ("--output_dir FOLDER/run", ["--output_dir", "metrics.jsonl", "use another one"]),
    # root may write anywhere but here
    "output folder not writable": ("--output_dir /proc/hvd_bert", ["--output_dir /proc/hvd_bert", "cannot be written"]),
    "damaged model": ("--config_name FOLDER/model", ["'FOLDER/model' cannot be loaded (config.json must contain"]),
    "unknown flag": ("--learning_rat 1", ["--learning_rat", "did you mean --learning_rate"]),
}


def mistake(name: str, folder: Path) -> tuple[list[str], list[str]]:
    """Its flags and words in a folder that has what they name."""
    entry = {"id": "q7", "question": "What colour?", "answers": [{"text": "red", "answer_start": 3}]}
    questions = {"data": [{"title": "t", "paragraphs": [{"context": "The box is red.", "qas": [entry]}]}]}
    contents = {"questions.json": json.dumps(questions), "model/config.json": "[]"}
    contents["run/metrics.jsonl"] = "of an earlier run"
    for file, content in contents.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content)
    flags, words = MISTAKES[name]
    return flags.replace("FOLDER", str(folder)).split(), [word.replace("FOLDER", str(folder)) for word in words]


def check(command: list[str], folder: Path, words: list[str], status: int | None = 2) -> str:
    """Run a command that must end with one message that has all `words`; status None: any but 0."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = run(command, folder)
    assert not outcome.hung, outcome
    assert outcome.status == status if status is not None else outcome.status != 0, outcome
    output = said(outcome)
    assert output.count("hvd_bert: ") == 1, outcome
    message = output[output.index("hvd_bert: ") :].splitlines()[0]
    assert [word for word in words if word not in message] == [], outcome
    assert "Traceback" not in output and "Training:" not in output, outcome
    assert {path: path.read_bytes() for path in before} == before, "files of an earlier run were changed"
    assert not list(folder.rglob("model.safetensors"))
    return output


@pytest.mark.parametrize("name", ["misplaced answer", "output folder not empty", "output folder not writable"])
def test_one_process(name: str, tmp_path: Path) -> None:
    flags, words = mistake(name, tmp_path)
    check(small_run(1, "out", *flags), tmp_path, words)


# horovodrun ends with 1 whatever the ranks' status, mpirun with theirs.
LAUNCHERS = {"mpirun": 2, "gloo": None}


# Each mistake under one of the launchers.
@pytest.mark.parametrize(("name", "by"), [("unknown flag", "gloo"), ("damaged model", "mpirun")])
def test_two_ranks_report_it_once(name: str, by: str, tmp_path: Path) -> None:
    flags, words = mistake(name, tmp_path)
    check([*launcher(2, by), *small_run(2, "out", *flags)], tmp_path, words, LAUNCHERS[by])


def test_file_that_one_rank_alone_misses(tmp_path: Path) -> None:
    (tmp_path / "0.json").symlink_to(SAMPLE_DEV)
    script = 'exec "$@" --train_file "${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}.json"'
    command = [*launcher(2, "gloo"), "bash", "-c", script, "bash", *small_run(2, "out")]
    check(command, tmp_path, [f"rank 1 on {os.uname().nodename}: ", "1.json: no such file"], None)
