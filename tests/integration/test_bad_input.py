"""Users' mistakes end all ranks before training, with one message that names the value. Status: 2, of horovodrun 1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import printed, small_run
from launch import SAMPLE_DEV, launcher, run

pytestmark = pytest.mark.integration


def check(command: list[str], folder: Path, words: list[str], status: int = 2) -> None:
    """Run a command that must fail with one message that contains all `words`, and must leave files unchanged."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = run(command, folder).expect(status)
    output = printed(outcome)
    assert output.count("hvd_bert: ") == 1, outcome
    message = output[output.index("hvd_bert: ") :].splitlines()[0]
    assert [word for word in words if word not in message] == [], outcome
    assert "Traceback" not in output and "Training:" not in output, outcome
    assert {path: path.read_bytes() for path in before} == before, "files of an earlier run were changed"
    assert not list(folder.rglob("model.safetensors"))


@pytest.mark.parametrize(
    ("size", "by", "flag", "value", "words", "status"),
    [
        (1, "none", "--output_dir", "run", ["--output_dir", "metrics.jsonl", "use another one"], 2),
        (2, "mpirun", "--config_name", "model", ["'model' cannot be loaded (config.json must contain"], 2),
        # horovodrun exits with 1.
        (2, "gloo", "--learning_rat", "1", ["--learning_rat", "did you mean --learning_rate"], 1),
    ],
    ids=["output folder not empty", "damaged model", "unknown flag"],
)
def test_mistake_is_reported_once(
    tmp_path: Path, size: int, by: str, flag: str, value: str, words: list[str], status: int
) -> None:
    for file, content in {"model/config.json": "[]", "run/metrics.jsonl": "of an earlier run"}.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(content)
    check([*launcher(size, by), *small_run(size, "out", flag, value)], tmp_path, words, status)


def test_file_that_only_one_rank_lacks(tmp_path: Path) -> None:
    (tmp_path / "0.json").symlink_to(SAMPLE_DEV)
    script = 'exec "$@" --train_file "${OMPI_COMM_WORLD_RANK:-$HOROVOD_RANK}.json"'
    command = [*launcher(2, "gloo"), "bash", "-c", script, "bash", *small_run(2, "out")]
    check(command, tmp_path, [f"rank 1 on {os.uname().nodename}: ", "1.json: no such file"], 1)


def test_interface_that_the_host_lacks(tmp_path: Path) -> None:
    """Each rank detects a missing interface before it joins the other ranks."""
    command = ["env", "HVD_BERT_INTERFACE=ib7", *launcher(2, "mpirun"), *small_run(2, "out")]
    check(command, tmp_path, ["HVD_BERT_INTERFACE=ib7", os.uname().nodename])
