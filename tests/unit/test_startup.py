"""The start of commands: --help must not import large libraries, and only one rank prints it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tables import each

HEAVY = {
    "torch",
    "horovod",
    "mpi4py",
    "datasets",
    "pandas",
    "scipy",
    "tensorboard",
    "deepspeed",
    "matplotlib",
    "pyarrow",
}
HEAVY |= {"transformers", "numpy"}
PROGRAM = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {missing!r}:
            raise SystemExit(0)

sys.meta_path.insert(0, Missing())
sys.argv = {argv!r}
try:
    runpy.run_module({argv!r}[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("imported:", *sorted({{name.split(".")[0] for name in sys.modules}} & {heavy!r}))
"""


def imported_by(
    *argv: str, missing: tuple[str, ...] = (), launcher: Mapping[str, str] | None = None
) -> tuple[str, set[str]]:
    """Run a command. Returns its output and the large libraries that it imports.

    It ends when it imports one of `missing`. `launcher`: the variables that a launcher sets.
    """
    program = PROGRAM.format(argv=[*argv], missing=missing, heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **(launcher or {})},
    )  # fmt: skip
    *printed, last = done.stdout.splitlines()
    return "\n".join(printed), set(last.split()[1:])


@each(
    ("words", "allowed"),
    [
        ("train", set()),
        ("tools.bench", set()),
        ("tools.bench sweep", set()),
        ("tools.tune", set()),
        ("tools.report", {"numpy", "matplotlib"}),
        ("tools.timeline", {"numpy"}),
        ("predict", set()),
        ("tools.evaluate", set()),
        ("tools.doctor", set()),
        ("tools.publish", set()),
        ("tools.export", set()),
        ("sample.generate", set()),
    ],
)
def test_help(words: str, allowed: set[str]) -> None:
    printed, imported = imported_by(*f"hvd_bert.{words}".split(), "--help")
    assert printed.startswith("usage: ")
    assert imported <= allowed


@each("command", ["hvd_bert.train", "hvd_bert.tools.bench", "hvd_bert.tools.doctor"])
@each("rank", [0, 1])
def test_only_rank_0_prints_help(command: str, rank: int) -> None:
    launcher = {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2"}
    printed, imported = imported_by(command, "--help", launcher=launcher)
    assert printed.startswith("usage: ") if rank == 0 else printed == ""
    assert imported == set()


def test_first_line_of_the_doctor() -> None:
    printed, imported = imported_by("hvd_bert.tools.doctor", missing=("hvd_bert.tools.doctor.diagnosis",))
    assert printed.startswith("hvd_bert doctor on ")
    assert imported == set()


def test_these_tests_detect_imports() -> None:
    question = ("--context", "a", "--question", "b")
    _, imported = imported_by("hvd_bert.predict", "nowhere", *question, missing=("hvd_bert.model.bert",))
    assert "torch" in imported
