"""Nothing runs code from a file, leaves its folder or shows markup, and any content is read or refused."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launch import SAMPLE
from refusals import refused

import hvd_bert
from hvd_bert.config.settings import ModelArguments
from hvd_bert.data import window_table
from hvd_bert.data.sources import squad
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.errors import UserError
from hvd_bert.model.bert import load_model
from hvd_bert.tasks.tokenizer import load_tokenizer

ANY_FOLDER = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

# --- no code ------------------------------------------------------------------------------------------

REPOSITORY = Path(hvd_bert.__file__).parent.parent
FOLDERS = ("hvd_bert", "benchmarks", "examples", "scripts")
PROGRAMS = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]
# Calls that run what a file holds, and the argument without which they do.
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "tempfile.mktemp", "yaml.unsafe_load", "yaml.full_load"}
FORBIDDEN |= {"pickle.load", "pickle.loads", "pickle.Unpickler"}  # the module's errors may be named
MODULES = {"cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp"}
LOADERS = ("from_pretrained", "from_config", "load_dataset")  # of a folder or the hub
SAFE_WITH = {"torch.load": ("weights_only", "True")}


def test_no_program_unpickles_or_runs_text() -> None:
    found, loaders = [], 0
    for path in PROGRAMS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                found += [f"{path}:{node.lineno}: {name}" for name in names & MODULES]
            if not isinstance(node, ast.Call):
                continue
            name, where = ast.unparse(node.func), f"{path}:{node.lineno}: {ast.unparse(node)[:80]}"
            flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe = name in FORBIDDEN or flags.get("shell", "False") != "False"
            unsafe |= flags.get("allow_pickle", "False") != "False" or name.split(".")[-1] == "load_module"
            unsafe |= name in SAFE_WITH and flags.get(SAFE_WITH[name][0]) != SAFE_WITH[name][1]
            if name.split(".")[-1] in LOADERS:
                loaders += 1
                unsafe |= flags.get("trust_remote_code") != "False"
            found += [where] if unsafe else []
    assert found == [] and loaders >= 8, "the search finds them"


def test_a_script_in_a_data_set_never_runs(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("mine.py", "dataset.py", "__init__.py"):
        (folder / name).write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    hostile.Canary(tmp_path / "ran").pickled(folder / "train.pkl")
    with pytest.raises(UserError, match="mine"):
        squad.open_hub(str(folder), "train", False).questions()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["windows.json", "windows.arrow", "sha256.json"])
@pytest.mark.parametrize("what", [*hostile.ALL, "pickle"])
def test_a_damaged_cache_is_built_again(
    tmp_path: Path, tokenizer: Any, make_questions: Any, own_cache: Path, caplog: Any, name: str, what: str
) -> None:
    source = squad.from_questions("small", make_questions(2))
    options = WindowOptions(32, 8)
    table = window_table.prepare(source, tokenizer, options)
    (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
    assert {path.name for path in entry.iterdir()} == {"windows.json", "windows.arrow", "sha256.json"}
    canary = hostile.Canary(tmp_path / "ran")
    (entry / name).unlink()
    (canary.pickled if what == "pickle" else hostile.ALL[what])(entry / name)
    for _ in range(2):
        assert len(window_table.prepare(source, tokenizer, options)) == len(table)
    assert caplog.messages == [f"{entry} is damaged: tokenizing again."] and not canary.ran


# --- any content ------------------------------------------------------------------------------------------


@ANY_FOLDER
@given(content=JSON | st.binary(max_size=60))
def test_any_data_are_read_or_refused(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    try:
        squad.open_file(path, False).questions()
    except UserError as error:
        assert "data.json" in str(error) and len(str(error)) < 1000


# No code of a model's folder or of a data set runs, and nobody is asked whether it may

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
        shutil.copy(SAMPLE / name, target)
    for name, own in (("config.json", CONFIG), ("tokenizer_config.json", TOKENIZER)):
        path = target / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | own), encoding="utf-8")
    (target / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")), encoding="utf-8")
    return target


def train(model: str) -> None:
    load_tokenizer(ModelArguments(model_name_or_path=model))


def train_from_scratch(model: str) -> None:
    load_model(ModelArguments(config_name=model), None, 32, seed=1)


@pytest.mark.parametrize("load", [train, train_from_scratch])
def test_code_is_refused_without_a_question(folder: Path, load: Callable[[str], Any], monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with refused(folder):
        load(str(folder))
    assert sys.stdin.readline() == "y\n"  # nobody has read it
    assert "custom code" not in "".join(capfd.readouterr())
    assert not (folder.parent / "ran").exists()
