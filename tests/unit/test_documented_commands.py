"""Commands in the documentation: the programs' parsers accept them, and the files they name exist.

bash runs each ```bash fence with programs that only record their arguments. tests/integration runs real commands.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import documented
import flags_page
import pytest
from documented import REPOSITORY, Fence

from hvd_bert.config import command_line

FENCES = [fence for page in documented.PAGES for fence in documented.fences(page)]
COMMANDS = ("python -m hvd_bert.", "hvd-bert ", "horovodrun ", "bash ")
SCRIPTS = [
    str(path.relative_to(REPOSITORY)) for folder in ("scripts", "env") for path in REPOSITORY.glob(f"{folder}/*.sh")
]
PROGRAMS = {"apptainer", "bash", "coverage", "docker", "git", "horovodrun", "hf", "hvd-bert", "mkdocs", "module"}
PROGRAMS |= {"mpirun", "mutmut", "pip", "python", "salloc", "sbatch", "sinfo", "srun", "tensorboard"}
PROGRAMS |= {"curl", "enroot", "torchrun"}
# Appends the program and its arguments to $RECORD, separated by control characters.
RECORDER = """#!/bin/sh
{ printf '%s\\037' "$0" "$@"; printf '\\036'; } >> "$RECORD"
"""
JOBS = {"scripts/hvd.slurm": "train", "scripts/scaling.slurm": "bench sweep"}
PARSERS = {
    parser.prog.removeprefix("hvd-bert "): parser
    for parser in (command.make_parser() for command in flags_page.OTHERS.values())
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder whose programs and scripts only record their arguments."""
    folder = tmp_path_factory.mktemp("clone")
    for name in (*(f"bin/{program}" for program in PROGRAMS), *SCRIPTS):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(RECORDER)
        path.chmod(0o755)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    return folder


def calls(text: str, clone: Path) -> list[list[str]]:
    """Run `text` in bash. Returns the program and arguments of each call, except `...`."""
    record = clone / "record"
    record.write_text("")
    environ = {"PATH": str(clone / "bin"), "RECORD": str(record), "USER": "user"}
    words = [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(words, cwd=clone, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = []
    for call in record.read_text().split("\036")[:-1]:
        program, *arguments = call.split("\037")[:-1]
        found.append([program.removeprefix(f"{clone}/bin/"), *(word for word in arguments if word not in ("...", "…"))])
    return found


def check(words: list[str]) -> None:
    """Parse a command with its program's parser; fail if the parser refuses it or a file does not exist."""
    if not words:
        return
    program, *arguments = words
    if program in LAUNCHERS:
        check(LAUNCHERS[program](arguments))
    elif program == "python" and arguments[0] == "-m":
        check_module(arguments[1:])
    elif program == "hvd-bert":
        check_command(arguments)
    elif program == "bash" and arguments[0] == "-c":
        check(shlex.split(arguments[1]))
    elif program in ("python", "bash"):
        check(arguments)
    elif program not in PROGRAMS:
        check_script(program, arguments)


def check_module(words: list[str]) -> None:
    name, *flags = words
    if name == "hvd_bert.train":
        check_command(["train", *flags])
    elif name != "build":
        assert name == "pytest", "hvd-bert NAME is shorter"
        check([word for word in flags if "/" in word])


def check_command(words: list[str]) -> None:
    name, *flags = words
    if flags[:1] == ["sweep"]:
        name, flags = "bench sweep", flags[1:]
    if "--help" in words:
        assert name in PARSERS or name in ("train", "--help")
    elif name == "train":
        command_line.parse(flags)
    elif name in ("bench", "bench sweep", "evaluate", "tune") or "--prove" in flags:
        _, rest = PARSERS[name].parse_known_args(flags)
        command_line.make_parser().parse_args(rest)  # no cross-checks: a sweep's flag may apply to one strategy only
    else:
        PARSERS[name].parse_args(flags)


def check_script(script: str, arguments: list[str]) -> None:
    assert (REPOSITORY / script).exists(), script
    if script in JOBS:
        check_command([*JOBS[script].split(), *arguments])


def horovodruns_command(arguments: list[str]) -> list[str]:
    from horovod.runner import launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["horovodrun", *arguments])
        command: list[str] = launch.parse_args().command
    return command


def started_command(arguments: list[str]) -> list[str]:
    """Return the command that mpirun, torchrun, srun or sbatch starts; [] for salloc, which opens a shell."""
    while arguments and arguments[0].startswith("-") and arguments[0] != "-m":
        arguments = arguments[2 if arguments[0] in ("-np", "--nproc-per-node") else 1 :]
    if not arguments or arguments[0].endswith(".slurm"):
        return arguments
    return arguments if arguments[0] in ("python", "hvd-bert") else ["python", *arguments]


LAUNCHERS = {"horovodrun": horovodruns_command} | dict.fromkeys(
    ("mpirun", "salloc", "sbatch", "srun", "torchrun"), started_command
)


@pytest.mark.parametrize("fence", FENCES)
def test_commands_of_a_fence(fence: Fence, clone: Path) -> None:
    found = calls(fence.content, clone)
    assert found or fence.content.startswith(("source ", "export ")), fence.content
    for words in found:
        check(words)


def test_commands_of_the_demo_and_the_readmes_table(clone: Path) -> None:
    script = (REPOSITORY / "scripts" / "demo.sh").read_text(encoding="utf-8")
    named = re.findall(r"^  \w[\w ]+?  +(\S.*)$", script.split("\nNext, ")[1], re.MULTILINE)
    spans = [span for span in documented.code_spans(documented.text_of("README.md")) if span.startswith(COMMANDS)]
    assert len(named) == 6 and len(spans) > 5
    for text in (*named, *spans):
        if text.startswith("docs/"):
            assert (REPOSITORY / text).exists()
        elif not text.startswith(("$PWD", "hvd-bert --help")):
            for words in calls(text, clone):
                check(words)
