"""Hostile files are skipped with a note or refused, hostile names are shown as text, and code in files never runs."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile
import pytest
from launch import SAMPLE
from made_runs import make_run, make_samples
from refusals import refused

import hvd_bert
from hvd_bert.config.settings import ModelArguments
from hvd_bert.data import window_table
from hvd_bert.data.sources import squad
from hvd_bert.data.window_cutting import WindowOptions
from hvd_bert.errors import EXIT_OK, UserError
from hvd_bert.model.bert import load_model
from hvd_bert.output import output_dir
from hvd_bert.tasks.tokenizer import load_tokenizer
from hvd_bert.tools.report import plots, run_page
from hvd_bert.tools.report.__main__ import main as report
from hvd_bert.tools.runs import record

pytestmark = pytest.mark.timeout(300)  # in case a reader blocks forever

# --- a run's files: the rest of the run is shown, and the run is left out of comparisons --------------

RUN_FILES = {
    "metrics.jsonl": True,  # True: comparisons need the file
    "train_results.json": True,
    "eval_results.json": False,
    "train_config.yaml": False,
    "events.jsonl": False,
    "eval_samples.json": False,
    "gpu_usage.jsonl": False,
    "checkpoint-20/state.json": False,
    ".lock": False,
}
UNNAMED = ("train_config.yaml", ".lock")  # no message: the report does not depend on them


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", steps=5, scores=(1.0, 2.0))
    make_samples(folder)
    (folder / "events.jsonl").write_text('{"event": "start", "train_steps": 5, "ranks": [{"rank": 0}]}\n')
    (folder / "gpu_usage.jsonl").write_text('{"step": 1, "gpu": 0}\n')
    (folder / "checkpoint-20").mkdir()
    (folder / "checkpoint-20" / "state.json").write_text('{"best": {"metric": "f1", "value": 2.0, "step": 20}}')
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("content", hostile.ALL)
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_is_shown_and_left_out_of_comparisons(run: Path, name: str, content: str) -> None:
    with hostile.in_place_of(run / name, content):
        shown = record.read(run)
        assert "\x1b" not in run_page.make_page(shown).as_text() + "\n".join(run_page.summary(shown))
        if content in hostile.NO_FILES and name not in UNNAMED:
            assert [problem for problem in shown.problems if Path(name).name in problem]
        reason = shown.comparable()
        if RUN_FILES[name]:
            assert name in reason
            hostile.check_message(reason.encode("ascii", "replace").decode())
        else:
            assert reason == "" and shown.results.train_steps == 5


# --- files that only the run reads: it continues without them or reports their path ------------------


@pytest.mark.parametrize("content", hostile.ALL)
def test_identity_of_a_wandb_run(tmp_path: Path, content: str) -> None:
    wandb = pytest.importorskip("hvd_bert.output.reporters.wandb")
    hostile.ALL[content](tmp_path / "tracking.json")
    try:
        wandb.read_run_id(tmp_path)
    except OSError as error:  # callers add the path
        assert content in hostile.NO_FILES
        hostile.check_message(error.strerror or str(error))


def test_damaged_lines_and_later_steps_are_removed_from_a_record(tmp_path: Path) -> None:
    lines = [b'{"step": 1}', b'{"step": 2, "a": "\xff"}', b"9" * 5000, b'{"step": 1e999}', b'{"step": 9}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*lines, b'{"step": 9}']))
    output_dir.forget_after(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join(lines[:2]) + b"\n"


NAMES = ["$\\frac{1}$", "$^$", "\x1b]0;title\x07", "a\ud800b", "<script>alert(1)</script>", "a\n# b", "|x|y|"]


def test_names_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of folders, strategies, devices, questions and warnings are shown as text. Damaged runs are left out."""
    make_run(tmp_path / "runs" / "none", device_name=NAMES[0])
    for number, name in enumerate(NAMES):
        folder = f"{number}{name}".encode(errors="replace").replace(b"/", b"_")
        run = make_run(tmp_path / "runs" / os.fsdecode(folder + b"\xff"), name, 2, 16, 19.0, device_name=NAMES[0])
        make_samples(run, f"What is {name}?")
        (run / "events.jsonl").write_text(json.dumps({"event": "warning", "message": name}) + "\n")
    make_run(tmp_path / "runs" / "bad", steps=3)
    (tmp_path / "runs" / "bad" / "metrics.jsonl").write_text('{"step": 1, "loss": Infinity}\n' * 2)
    assert report([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == EXIT_OK
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\ud800"} & set(shown + page[page.index("<body") :]) and "<script>alert" not in page
    assert "bad: " in shown and "Strong scaling" in shown and "alert(1)" in shown
    assert len(list((tmp_path / "out").glob("*.png"))) == len(plots.MEASURES)


# --- no code ------------------------------------------------------------------------------------------

REPOSITORY = Path(hvd_bert.__file__).parent.parent
FOLDERS = ("hvd_bert", "benchmarks", "examples", "scripts")
PROGRAMS = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob("*.py"))]
# Calls that may run code in a file, and the arguments that prevent it.
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "tempfile.mktemp", "yaml.unsafe_load", "yaml.full_load"}
FORBIDDEN |= {"pickle.load", "pickle.loads", "pickle.Unpickler"}  # but pickle.UnpicklingError is allowed
MODULES = {"cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "imp"}
LOADERS = ("from_pretrained", "from_config", "load_dataset")  # they could run code from a folder or the hub
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


@pytest.mark.parametrize("name", ["windows.json", "windows.arrow", "questions.npy", "sha256.json"])
@pytest.mark.parametrize("content", [*hostile.ALL, "pickle"])
def test_a_damaged_cache_is_refused(tmp_path, tokenizer, make_questions, own_cache, name, content):
    source, options = squad.from_questions("small", make_questions(2)), WindowOptions(32, 8)
    window_table.prepare(source, tokenizer, options)
    (entry,) = (path for path in own_cache.iterdir() if path.is_dir())
    canary = hostile.Canary(tmp_path / "ran")
    (entry / name).unlink()
    (canary.pickled if content == "pickle" else hostile.ALL[content])(entry / name)
    with refused(entry, "damaged"):
        window_table.prepare(source, tokenizer, options)
    assert not canary.ran


# --- code in a model's folder never runs, and the user is not asked for permission --------------------

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
    """Make a model folder whose configuration and tokenizer refer to code in the folder."""
    target = tmp_path / "model"
    target.mkdir()
    for name in ("config.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(SAMPLE / name, target)
    for name, reference in (("config.json", CONFIG), ("tokenizer_config.json", TOKENIZER)):
        path = target / name
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | reference), encoding="utf-8")
    (target / "own.py").write_text(CODE.format(ran=str(tmp_path / "ran")), encoding="utf-8")
    return target


def train(model: str) -> None:
    load_tokenizer(ModelArguments(model_name_or_path=model))


def train_from_scratch(model: str) -> None:
    load_model(ModelArguments(config_name=model), None, 32, seed=1)


@pytest.mark.parametrize("load", [train, train_from_scratch])
def test_code_is_refused_without_a_prompt(folder: Path, load: Callable[[str], Any], monkeypatch, capfd) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with refused(folder):
        load(str(folder))
    assert sys.stdin.readline() == "y\n"  # no prompt has read the answer
    assert "custom code" not in "".join(capfd.readouterr())
    assert not (folder.parent / "ran").exists()
