"""YAML files of flags: values that YAML would change, and files that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each

from hvd_bert.config import settings_file
from hvd_bert.config.command_line import parse
from hvd_bert.errors import UserError

pytestmark = pytest.mark.timeout(60)  # a file that blocks must fail its test soon


def write(folder: Path, content: str | bytes) -> str:
    path = folder / "settings.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refusal(name: str) -> str:
    with pytest.raises(UserError) as refused:
        parse(["--config", name])
    return str(refused.value)


@each(
    ("text", "name", "value"),
    [
        ("timeline_steps: 1:30", "timeline_steps", "1:30"),
        ("model_revision: 2024-02-30", "model_revision", "2024-02-30"),
        ("model_revision: 0123456", "model_revision", "0123456"),
        ("model_revision: 1_000", "model_revision", "1_000"),
        ("model_revision: 1e5", "model_revision", "1e5"),
        ("model_revision: 1.10", "model_revision", "1.10"),
        ("output_dir: yes", "output_dir", "yes"),
        ("output_dir: 'null'", "output_dir", "null"),
        ("output_dir: null", "output_dir", None),
        ("lr_scaling: none", "lr_scaling", "none"),
        ("seed: 010", "seed", 10),
        ("bf16: on", "bf16", True),
        ("do_eval: Off", "do_eval", False),
        ("null_score_diff_threshold: .inf", "null_score_diff_threshold", float("inf")),
        ("null_score_diff_threshold: -.inf", "null_score_diff_threshold", float("-inf")),
        ("learning_rate: 1e-3\nseed: &a 3\nmax_steps: *a", "max_steps", 3),
    ],
)
def test_values_are_those_of_the_command_line(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert parse(["--config", write(tmp_path, text)]).as_flat()[name] == value


@each(
    ("content", "words"),
    [
        ("seed: 1\nbf16: true\nseed: 2\n", "'seed' is given twice, in lines 1 and 3"),
        ("seed: 1\nseed: 1\n", "'seed' is given twice"),
        ("seed: 1:30", "invalid int value: '1:30'"),
        ("learning_rate: 1:30.5", "invalid float value: '1:30.5'"),
        ("seed: " + "9" * 5000, "invalid int value: '99"),
        ("gradient_accumulation_steps: 1000000000000", "1000000000000 is out of range"),
        ("train_file: ''", "'' is empty"),
        ('train_file: "a\\0b"', "contains a NUL character"),
        ('train_file: "a\\ud800"', "is not valid UTF-8"),
        (b"train_file: a\xff\n", "not UTF-8 text (byte 13)"),
        ("train_file: !!binary aGVsbG8=", "has the tag"),
        ("!!set {seed}", "the tag tag:yaml.org,2002:set is not supported"),
        ("? [a]\n: 1\n", "must be lines of `flag: value`"),
        ("{a: " * 20_000, "nested too deeply"),
        ("- " * 20_000, "nested too deeply"),
        ("#" * 2_000_000, "larger than 1 MiB"),
    ],
)
def test_refused(tmp_path: Path, content: str | bytes, words: str) -> None:
    name = write(tmp_path, content)
    message = refusal(name)
    assert words in message and message.startswith(f"--config {name}: ") and len(message) < 1000


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero"):
        assert f"--config {name}: cannot be read as YAML: it is a pipe or a device" in refusal(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "--config needs a value"),
        ("a\0b", "contains a NUL character"),
        ("a\ud800", "is not valid UTF-8"),
        ("a" * 300, "is too long for a file"),
        ("a/" * 3000, "is too long for a file"),
    ],
    ids=["empty", "NUL", "surrogate", "long name", "long path"],
)
def test_names_that_no_file_has(name: str, words: str) -> None:
    message = refusal(name)
    assert words in message and message.isascii() and len(message) < 500


@given(content=st.binary(max_size=60) | st.text(alphabet="seed: 1-[]{}&*!|>'\"#\n~.\0é", max_size=40).map(str.encode))
def test_any_content_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        settings_file.read("any", Path(write(folder, content)))
    except UserError as refused:
        assert str(refused).startswith("--config any: ")
