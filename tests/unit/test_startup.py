"""Large libraries that commands must not import before they print."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def imported_by(*argv: str, missing: tuple[str, ...] = ()) -> tuple[str, set[str]]:
    """A command's output and the large libraries that it imports. It ends if it imports one of `missing`."""
    program = PROGRAM.format(argv=[*argv], missing=missing, heavy=HEAVY | {"transformers", "numpy"})
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    *printed, last = done.stdout.splitlines()
    return "\n".join(printed), set(last.split()[1:])


# HfArgumentParser is from transformers, which imports numpy.
@pytest.mark.parametrize(
    ("argv", "allowed"),
    [
        (["hvd_bert.train"], {"transformers", "numpy"}),
        (["hvd_bert.bench"], {"transformers", "numpy"}),
        (["hvd_bert.bench", "sweep"], {"transformers", "numpy"}),
        (["hvd_bert.tune"], {"transformers", "numpy"}),
        (["hvd_bert.report"], {"numpy", "matplotlib"}),
        (["hvd_bert.timeline"], {"numpy"}),
        (["hvd_bert.predict"], set()),
        (["hvd_bert.doctor"], set()),
        (["hvd_bert.sample.generate"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help(argv: list[str], allowed: set[str]) -> None:
    printed, imported = imported_by(*argv, "--help")
    assert printed.startswith("usage: ")
    assert imported <= allowed


def test_first_line_of_the_doctor() -> None:
    printed, imported = imported_by("hvd_bert.doctor", missing=("hvd_bert.doctor.diagnosis",))
    assert printed.startswith("hvd_bert doctor on ")
    assert imported == set()


def test_this_test_sees_what_is_imported() -> None:
    _, imported = imported_by("hvd_bert.predict", "nowhere", "--context", "a", "--question", "b", missing=("tqdm",))
    assert "torch" in imported
