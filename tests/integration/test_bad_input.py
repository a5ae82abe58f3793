"""Mistakes of users: one message that says what and where, status 2, before any training, and never a hang."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import said, small_run
from launch import SAMPLE_DEV, TRAIN, launcher, run

pytestmark = pytest.mark.integration

# folder -> flags that follow those of a good run, and what the message must say
Mistake = Callable[[Path], tuple[list[str], list[str]]]
MISTAKES: dict[str, Mistake] = {}


def mistake(function: Mistake) -> Mistake:
    MISTAKES[function.__name__] = function
    return function


def _file(folder: Path, text: str) -> str:
    path = folder / "questions.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _questions(context: str, start: int) -> str:
    answers = [{"text": "red", "answer_start": start}]
    entry = {"id": "q7", "question": "What colour?", "answers": answers}
    return json.dumps({"data": [{"title": "t", "paragraphs": [{"context": context, "qas": [entry]}]}]})


@mistake
def missing_file(folder: Path) -> tuple[list[str], list[str]]:
    path = str(folder / "nowhere.json")
    return ["--train_file", path], [path, "no such file"]


@mistake
def answer_not_at_its_offset(folder: Path) -> tuple[list[str], list[str]]:
    path = _file(folder, _questions("The box is red.", 3))
    return ["--train_file", path], [path, "q7", "'red'", "character 3"]


@mistake
def output_dir_not_empty(folder: Path) -> tuple[list[str], list[str]]:
    (folder / "out").mkdir()
    (folder / "out" / "metrics.jsonl").write_text("of an earlier run")
    return [], ["--output_dir", "metrics.jsonl", "use another folder"]


@mistake
def output_dir_unwritable(folder: Path) -> tuple[list[str], list[str]]:
    # root may write anywhere but here
    return ["--output_dir", "/proc/hvd_bert"], ["--output_dir /proc/hvd_bert", "cannot be written"]


@mistake
def damaged_model(folder: Path) -> tuple[list[str], list[str]]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("[]")
    path = str(folder / "model")
    return ["--config_name", path], [f"'{path}' cannot be loaded (config.json must contain a JSON object)"]


@mistake
def unknown_flag(folder: Path) -> tuple[list[str], list[str]]:
    return ["--learning_rat", "1"], ["--learning_rat", "did you mean --learning_rate"]


@mistake
def unknown_yaml_key(folder: Path) -> tuple[list[str], list[str]]:
    path = folder / "mine.yaml"
    path.write_text("learning_rat: 1\n")
    return ["--config", str(path)], [str(path), "'learning_rat'", "learning_rate"]


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


@pytest.mark.parametrize("name", MISTAKES)
def test_one_process(name: str, tmp_path: Path) -> None:
    flags, words = MISTAKES[name](tmp_path)
    check(small_run(1, "out", *flags), tmp_path, words)


# horovodrun ends with 1 whatever the ranks' status, mpirun with theirs.
LAUNCHERS = {"mpirun": 2, "gloo": None}


# Each mistake under one of the launchers.
@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("answer_not_at_its_offset", "gloo"),
        ("output_dir_not_empty", "mpirun"),
        ("unknown_flag", "gloo"),
        ("damaged_model", "mpirun"),
    ],
)
def test_two_ranks_report_it_once(name: str, by: str, tmp_path: Path) -> None:
    flags, words = MISTAKES[name](tmp_path)
    check([*launcher(2, by), *small_run(2, "out", *flags)], tmp_path, words, LAUNCHERS[by])


def test_fewer_windows_than_ranks(tmp_path: Path) -> None:
    flags = ["--max_train_samples", "1"]
    check([*launcher(2, "mpirun"), *small_run(2, "out", *flags)], tmp_path, ["1 windows", "2 ranks"])


def test_file_that_one_rank_alone_misses(tmp_path: Path) -> None:
    (tmp_path / "0.json").symlink_to(SAMPLE_DEV)
    script = 'exec "$@" --train_file "${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}.json"'
    command = [*launcher(2, "gloo"), "bash", "-c", script, "bash", *small_run(2, "out")]
    check(command, tmp_path, [f"rank 1 on {os.uname().nodename}: ", "1.json: no such file"], None)


@pytest.mark.parametrize("rank", [0, 1])
def test_worlds_of_one_are_refused(rank: int, tmp_path: Path) -> None:
    # What a launcher does that Horovod's MPI does not know: each of its processes finds itself alone.
    env: dict[str, str | None] = {"PMI_SIZE": "2", "PMI_RANK": str(rank)}
    outcome = run([*TRAIN, "--config", "sample", "--output_dir", "out"], tmp_path, env=env)
    assert not (tmp_path / "out").exists(), outcome
    if rank == 0:
        outcome.expect(2)
        assert outcome.output.count("mpirun started 2 processes, but Horovod sees a world of 1") == 1, outcome
    else:
        assert outcome.output.count("hvd_bert: ") == 0, outcome
