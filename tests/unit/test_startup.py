"""Start-up of commands: --help without imports of large libraries, wrong commands, and broken installations."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
from refusals import check_refusal

import hvd_bert
from hvd_bert.config.settings import PACKAGE
from hvd_bert.errors import EXIT_BAD_INPUT, EXIT_OK

pytestmark = pytest.mark.slow
HVD_BERT = str(Path(sys.executable).with_name("hvd-bert"))
HELP_OUTPUT = ["--help", "output"]
HEAVY = {"torch", "horovod", "mpi4py", "datasets", "pandas", "scipy", "tensorboard", "deepspeed", "matplotlib"}
HEAVY |= {"pyarrow", "transformers", "numpy"}
ALLOWED = {words: {"numpy"} for words in ("tools.bench sweep", "tools.tune", "tools.timeline")}
ALLOWED["tools.report"] = {"numpy", "matplotlib"}
HELPS: list[tuple[str, str]] = [(words, "") for words in ["predict", "tools.evaluate", *ALLOWED]]
HELPS += [(words, rank) for words in ("train", "tools.bench", "tools.doctor") for rank in "01"]


def run(*words: str, rank: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command. `rank`: the command's rank in a world of two; empty: no launcher. `environ`: more variables."""
    launcher = {"HOROVOD_RANK": rank, "HOROVOD_LOCAL_RANK": rank, "HOROVOD_SIZE": "2"} if rank else {}
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **launcher, **environ}
    return subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=False)


@pytest.mark.parametrize(("words", "rank"), HELPS)
def test_help(words: str, rank: str) -> None:
    done = run(sys.executable, "-X", "importtime", "-m", *f"hvd_bert.{words}".split(), "--help", rank=rank)
    assert done.returncode == 0
    assert done.stdout == "" if rank == "1" else done.stdout.startswith("usage: ")
    imported = set(re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.MULTILINE))
    assert "hvd_bert" in imported
    assert imported & HEAVY <= ALLOWED.get(words, set())


def test_unknown_topic_of_help_is_named_by_rank_0() -> None:
    done = run(sys.executable, "-m", "hvd_bert.train", "--help", "learning")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (EXIT_BAD_INPUT, "", 1)
    done = run(sys.executable, "-m", "hvd_bert.train", "--help", "learning", rank="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_with_an_equals_sign() -> None:
    first, second = (run(sys.executable, "-m", "hvd_bert.train", *words) for words in (["--help=output"], HELP_OUTPUT))
    assert (first.returncode, first.stdout, first.stderr) == (0, second.stdout, "") and "--report_to" in first.stdout


def test_every_command_is_listed_with_its_purpose() -> None:
    listed = dict(re.findall(r"^  ([a-z]+) +(\S.*)$", run(HVD_BERT, "--help").stdout, re.MULTILINE))
    assert listed.keys() >= {"bench", "doctor", "predict", "report", "timeline", "train", "tune"}
    mains = (path.parent.name for path in PACKAGE.glob("**/*/__main__.py"))
    assert list(listed) == sorted(["train", *mains])
    assert [name for name, purpose in listed.items() if not purpose.endswith(".")] == [], "one line each"


def test_a_command_runs_as_by_its_module() -> None:
    done = run(HVD_BERT, "doctor", "--sise", "3")
    expected = run(sys.executable, "-m", "hvd_bert.tools.doctor", "--sise", "3")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected.stderr)
    assert run(HVD_BERT, "--version").stdout == f"hvd-bert {hvd_bert.__version__}\n"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", " Did you mean train?"),
        ("eval", " Did you mean evaluate?"),
        ("benchmark", " Did you mean bench?"),
        ("import", ""),  # similar to report, but not a typo
    ],
)
def test_unknown_command_is_named_by_rank_0(word: str, hint: str) -> None:
    message = f"hvd_bert: unknown command '{word}'.{hint} `hvd-bert --help` lists the commands.\n"
    by_hand = {"WORLD_SIZE": "2", "RANK": "1"}  # without a launcher, rank 1 needs the failure status, too
    for rank, environ, status, error in (("0", {}, 2, message), ("1", {}, 0, ""), ("", by_hand, 2, "")):
        done = run(HVD_BERT, word, rank=rank, **environ)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", error)


@pytest.mark.parametrize("module", ["train", "predict", "tools.evaluate", "tools.doctor"])
def test_another_ranks_local_rank_is_refused(module: str) -> None:
    second = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    done = run(sys.executable, "-m", f"hvd_bert.{module}", "--local_rank=0", **second)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "--local_rank 0" in done.stderr and "LOCAL_RANK is 1" in done.stderr


def test_help_of_scripts() -> None:
    for name in ("demo", "test"):
        assert run("bash", str(PACKAGE.parent / f"scripts/{name}.sh"), "--help").stdout.startswith("Sets up")


@pytest.mark.parametrize("loading", ["from torch import _C", "import ctypes; ctypes.CDLL({!r})"])
@pytest.mark.parametrize("words", ["train", "predict MODEL --context a --question b", "tools.doctor"])
def test_a_package_whose_library_is_damaged(tmp_path: Path, words: str, loading: str) -> None:
    library = tmp_path / "torch" / f"_C{EXTENSION_SUFFIXES[0]}"
    library.parent.mkdir()
    library.write_text("cut")
    library.with_name("__init__.py").write_text(loading.format(str(library)))
    done = run(sys.executable, "-m", *f"hvd_bert.{words}".split(), PYTHONPATH=f"{tmp_path}:{PACKAGE.parent}")
    printed = done.stdout + done.stderr
    assert done.returncode == EXIT_BAD_INPUT and str(library) in printed and "Traceback" not in printed


@pytest.mark.parametrize("rank", ["", "0", "1"])
@pytest.mark.parametrize("command", ["tools.doctor", "train", "tools.timeline", "predict"])
def test_python_without_the_packages(command: str, rank: str) -> None:
    done = run(sys.executable, "-S", "-m", f"hvd_bert.{command}", rank=rank)
    assert (done.returncode, done.stdout) == (EXIT_OK if rank == "1" else EXIT_BAD_INPUT, "")
    if rank == "1":
        assert done.stderr == ""
    else:
        check_refusal(done.stderr.removesuffix("\n"), "No module named", sys.executable)
        assert "/.venv/bin/activate" in done.stderr or "/env/setup.sh" in done.stderr
