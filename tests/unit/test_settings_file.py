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
from hvd_bert.config.settings import PACKAGE
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
        ("null_score_diff_threshold: -0.00001", "null_score_diff_threshold", -1e-5),
        ("output_dir: -runs of mine", "output_dir", "-runs of mine"),
        ("train_file: a = b.json", "train_file", "a = b.json"),
        ("do_eval: false", "do_eval", False),
        ("learning_rate: 3e-5", "learning_rate", 3e-5),  # text for YAML, a number for us
        ("eval_strategy: no", "eval_strategy", "no"),
        ("\ufeffseed: 5", "seed", 5),
        ("validation_file: '{package}/sample/dev.json'", "validation_file", f"{PACKAGE}/sample/dev.json"),
        ("model_revision: 2024-02-30", "model_revision", "2024-02-30"),
        ("model_revision: 0123456", "model_revision", "0123456"),
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
    ("content", "named"),
    [
        ("learning_rat: 1", ["'learning_rat'", "did you mean learning_rate?"]),
        ("config: sample", ["'config'"]),
        ("1: 2", ["'1'"]),
        ("seed: [1, 2]", ["'seed'", "list"]),
        ("seed: {a: 1}", ["'seed'", "dict"]),
        ("seed: red", ["--seed", "'red'"]),
        ("seed: -1", ["--seed -1"]),
        ("seed: 1\nbf16: true\nseed: 2\n", ["'seed'", "lines 1 and 3"]),
        ("seed: 1:30", ["--seed", "'1:30'"]),
        ("learning_rate: 1:30.5", ["--learning_rate", "'1:30.5'"]),
        ("seed: " + "9" * 5000, ["--seed", "'99"]),
        ("gradient_accumulation_steps: 1000000000000", ["--gradient_accumulation_steps", "1000000000000"]),
        ("train_file: ''", ["--train_file", "''"]),
        ('train_file: "a\\0b"', ["--train_file", "NUL"]),
        ('train_file: "a\\ud800"', ["--train_file", "UTF-8"]),
        (b"train_file: a\xff\n", ["byte 13"]),
        ("train_file: !!binary aGVsbG8=", ["'train_file'", "binary"]),
        ("seed: !!python/object/apply:os.getcwd []", ["'seed'", "os.getcwd"]),
        ("!!set {seed}", ["tag:yaml.org,2002:set"]),
        ("? [a]\n: 1\n", ["flag: value"]),
        ("- seed\n- learning_rate\n", ["flag: value"]),
        ("", ["flag: value"]),
        ("seed: 1\n  learning_rate: [", ["YAML", "line 2"]),
        ("{a: " * 20_000, ["nested"]),
        ("- " * 20_000, ["nested"]),
        ("#" * 2_000_000, ["1 MiB"]),
    ],
)
def test_refused(tmp_path: Path, content: str | bytes, named: list[str]) -> None:
    name = write(tmp_path, content)
    message = refusal(name)
    assert message.startswith(f"--config {name}: ") and len(message) < 1000
    assert all(value in message for value in named), message


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path)):
        assert refusal(name).startswith(f"--config {name}: cannot be read")


@each("name", ["", "a\0b", "a\ud800", "a" * 300, "a/" * 3000])
def test_names_that_no_file_has(name: str) -> None:
    message = refusal(name)
    assert message.startswith("--config ") and message.isascii() and len(message) < 500


@given(content=st.binary(max_size=60) | st.text(alphabet="seed: 1-[]{}&*!|>'\"#\n~.\0é", max_size=40).map(str.encode))
def test_any_content_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        settings_file.read("any", Path(write(folder, content)))
    except UserError as refused:
        assert str(refused).startswith("--config any: ")
