"""The start of commands: --help must not import large libraries, and only one rank prints it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tables import check_refusal

import hvd_bert
from hvd_bert import startup
from hvd_bert.config.settings import PACKAGE
from hvd_bert.errors import EXIT_BAD_INPUT

HEAVY = {"torch", "horovod", "mpi4py", "datasets", "pandas", "scipy", "tensorboard", "deepspeed", "matplotlib"}
HEAVY |= {"pyarrow", "transformers", "numpy"}
pytestmark = pytest.mark.slow
PROGRAM = """
import runpy, sys

sys.argv = {argv!r}
try:
    runpy.run_module({argv!r}[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("imported:", *sorted({{name.split(".")[0] for name in sys.modules}} & {heavy!r}))
"""


def imported_by(*argv: str, launcher: Mapping[str, str]) -> tuple[str, set[str]]:
    """Run a command with a launcher's variables. Returns its output and the large libraries that it imports."""
    program = PROGRAM.format(argv=[*argv], heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **launcher},
    )  # fmt: skip
    *printed, last = done.stdout.splitlines()
    return "\n".join(printed), set(last.split()[1:])


OF_RANKS = ["train", "tools.bench", "tools.doctor"]
OF_ONE_PROCESS = ["predict", "tools.evaluate"]
ALLOWED = {words: {"numpy"} for words in ("tools.bench sweep", "tools.tune", "tools.timeline")}
ALLOWED["tools.report"] = {"numpy", "matplotlib"}
HELPS: list[tuple[str, str | None]] = [(words, None) for words in [*OF_ONE_PROCESS, *ALLOWED]]
HELPS += [(words, rank) for words in OF_RANKS for rank in "01"]


@pytest.mark.parametrize(("words", "rank"), HELPS)
def test_help(words: str, rank: str | None) -> None:
    launcher = {"HOROVOD_RANK": rank, "HOROVOD_SIZE": "2"} if rank else {}
    printed, imported = imported_by(*f"hvd_bert.{words}".split(), "--help", launcher=launcher)
    assert printed == "" if rank == "1" else printed.startswith("usage: ")
    assert imported <= ALLOWED.get(words, set())


# `hvd-bert COMMAND`: each command under one name, by the script that pip makes of pyproject.toml's entry point

PYPROJECT = Path(hvd_bert.__file__).parents[1] / "pyproject.toml"


def make_script(folder: Path, python: str | Path = sys.executable) -> Path:
    """What pip writes for the entry point."""
    (entry,) = re.findall(r'^hvd-bert = "([\w.]+):(\w+)"$', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    script = folder / "hvd-bert"
    script.write_text(f"#!{python}\nimport sys\nfrom {entry[0]} import {entry[1]}\nsys.exit({entry[1]}())\n")
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_script(tmp_path_factory.mktemp("bin"))


def run(script: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, **environ}
    return subprocess.run([script, *words], capture_output=True, text=True, env=env, timeout=60, check=False)


def test_every_command_is_listed_with_its_purpose(script: Path) -> None:
    listed = dict(re.findall(r"^  ([a-z]+) +(\S.*)$", run(script, "--help").stdout, re.MULTILINE))
    assert listed.keys() >= {"bench", "doctor", "predict", "report", "timeline", "train", "tune"}
    mains = (path.parent.name for path in Path(hvd_bert.__file__).parent.glob("**/*/__main__.py"))
    assert list(listed) == sorted(["train", *mains])
    assert [name for name, purpose in listed.items() if not purpose.endswith(".")] == [], "one line each"


def test_a_command_runs_as_by_its_module(script: Path) -> None:
    done = run(script, "doctor", "--sise", "3")
    module = [sys.executable, "-m", "hvd_bert.tools.doctor", "--sise", "3"]
    expected = subprocess.run(module, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected.stderr)


@pytest.mark.parametrize(
    ("word", "hint"), [("trian", " Did you mean train?"), ("xyz", ""), ("--train", " Did you mean train?")]
)
def test_unknown_command(script: Path, word: str, hint: str) -> None:
    done = run(script, word)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hvd_bert: unknown command '{word}'.{hint} `hvd-bert --help` lists the commands.\n"


def test_only_rank_0_prints(script: Path) -> None:
    printed = [run(script, "trian", HOROVOD_RANK=rank, HOROVOD_SIZE="2") for rank in "01"]
    assert printed[0].stdout + printed[0].stderr
    assert (printed[1].returncode, printed[1].stdout, printed[1].stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["--bf16", "--seed=1"], ["--bf16", "--seed=1"]),
        (["--local=1"], ["--local=1"]),  # reported as unknown
        (["--local_rank=1", "train", "--bf16"], ["train", "--bf16"]),
        (["--bf16", "--local-rank", "1", "--", "x"], ["--bf16", "--", "x"]),
        (["--local-rank=1", "--local_rank", "1"], []),
    ],
)
def test_local_rank_is_no_setting(words, rest, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["command", *words])
    startup.take_local_rank()
    assert sys.argv[1:] == rest


@pytest.mark.parametrize(
    ("words", "own"),
    [(["--local_rank=0"], "1"), (["--local_rank=1", "--local-rank", "0"], "1"), (["--local_rank", "--bf16"], None)],
)
def test_local_rank_is_the_launchers(words, own, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", *words])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if own:
        monkeypatch.setenv("LOCAL_RANK", own)
    with pytest.raises(SystemExit, match=str(EXIT_BAD_INPUT)):
        startup.take_local_rank()
    assert f"LOCAL_RANK is {own or 'not set'}. Remove the flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    "module", ["hvd_bert.train", "hvd_bert.predict", "hvd_bert.tools.evaluate", "hvd_bert.tools.doctor"]
)
def test_another_ranks_local_rank_is_refused(module: str) -> None:
    second = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    done = run(Path(sys.executable), "-m", module, "--local_rank=0", **second)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "--local_rank 0" in done.stderr and "LOCAL_RANK is 1" in done.stderr


def test_version(script: Path) -> None:
    assert run(script, "--version").stdout == f"hvd-bert {hvd_bert.__version__}\n"


def test_help_of_scripts() -> None:
    for path in (PYPROJECT.parent / f"scripts/{name}.sh" for name in ("demo", "test")):
        assert run(Path("/bin/bash"), str(path), "--help").stdout.startswith("Sets up")


@pytest.mark.parametrize("command", ["tools.doctor", "train", "tools.timeline", "predict"])
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_python_without_the_packages(command: str, rank: str | None) -> None:
    launcher = {} if rank is None else {"HOROVOD_RANK": rank, "HOROVOD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-S", "-m", f"hvd_bert.{command}"], capture_output=True, text=True, timeout=60,
        env={**os.environ, **launcher},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (EXIT_BAD_INPUT, "")
    if rank == "1":
        assert done.stderr == ""
    else:
        check_refusal(done.stderr.removesuffix("\n"), "No module named", sys.executable)
        assert "/.venv/bin/activate" in done.stderr or "/env/setup.sh" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=words.split()[0])
        for words in (
            "psutil hvd_bert.tools.doctor",
            "filelock hvd_bert.train --config sample",
            "accelerate hvd_bert.train --config sample",
            "pyarrow hvd_bert.predict none --context a --question b",
        )
    ],
)
def test_package_that_was_removed(words: str, tmp_path: Path) -> None:
    package, *argv = words.split()
    missing = f"No module named '{package}'"
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError({missing!r}, name={package!r})\n")
    paths = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    done = subprocess.run(
        [sys.executable, "-m", *argv], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == EXIT_BAD_INPUT
    check_refusal(done.stderr.rstrip("\n"), package, "env/setup.sh")
