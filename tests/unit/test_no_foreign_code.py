"""No code of a model's folder or of a data set runs, and nobody is asked whether it may."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tables import refused
from test_world import make_world

import hvd_bert
from hvd_bert.config.settings import ModelArguments
from hvd_bert.model.bert import load_model, load_tokenizer
from hvd_bert.sample import files as sample
from hvd_bert.tools.bench import speed
from hvd_bert.tools.bench.__main__ import parse
from hvd_bert.tools.doctor import collective

REPOSITORY = Path(hvd_bert.__file__).parent.parent
PROGRAMS = [
    path
    for folder in ("hvd_bert", "benchmarks", "examples", "scripts")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
LOADERS = ("from_pretrained", "from_config", "load_dataset")


@cache
def loader_calls(path: Path) -> list[ast.Call]:
    """Calls in a file that could load code from a folder or the hub."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func).split(".")[-1] in LOADERS]


def test_every_call_refuses_code():
    calls = [(path, call) for path in PROGRAMS for call in loader_calls(path)]
    assert len(calls) >= 8  # the search finds them
    for path, call in calls:
        flags = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert flags.get("trust_remote_code") == "False", f"{path}:{call.lineno}: {ast.unparse(call)}"


CODE = """
import pathlib
pathlib.Path({ran!r}).touch()
from transformers import BertConfig, BertTokenizer
class Config(BertConfig): model_type = "own"
class Tokenizer(BertTokenizer): pass
"""
CONFIG = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
TOKENIZER = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Tokenizer", "own.Tokenizer"]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder whose configuration and tokenizer name code that is next to them."""
    target = tmp_path / "model"
    target.mkdir()
    for name in ("config.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(Path(sample.__file__).parent / name, target)
    for name, settings in (("config.json", CONFIG), ("tokenizer_config.json", TOKENIZER)):
        path = target / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    (target / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")), encoding="utf-8")
    return target


def train(model: str) -> None:
    load_tokenizer(ModelArguments(model_name_or_path=model))


def train_from_scratch(model: str) -> None:
    load_model(ModelArguments(config_name=model), None, 32, seed=1)


def bench(model: str) -> None:
    speed.random_task(model, 1, parse([])[1], make_world())


def doctor(model: str) -> None:
    collective.gradient_bytes(model)


@pytest.mark.parametrize("answer", ["", "y\n"], ids=["silent", "yes"])
@pytest.mark.parametrize("load", [train, train_from_scratch, bench, doctor])
def test_code_is_refused_without_a_question(
    folder: Path, tmp_path: Path, load: Callable[[str], Any], answer: str, monkeypatch, capfd
) -> None:
    reading, writing = os.pipe()  # stays open: a question would wait for an answer
    with os.fdopen(reading) as stdin, os.fdopen(writing, "w") as terminal:
        terminal.write(answer)
        terminal.flush()
        monkeypatch.setattr(sys, "stdin", stdin)
        with refused(folder):
            load(str(folder))
        if answer:
            assert stdin.readline() == answer  # nobody has read it
    assert "custom code" not in "".join(capfd.readouterr())
    assert not (tmp_path / "ran").exists()
