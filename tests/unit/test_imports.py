"""Horovod, the launcher's variables and the tests' helpers are used only where they belong.

`lint-imports` checks the layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import grimp

import hvd_bert

REPOSITORY = Path(hvd_bert.__file__).parent.parent
TEXTS = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for folder in ("hvd_bert", "benchmarks", "examples", "scripts")
    for path in (REPOSITORY / folder).rglob("*.py")
}
PACKAGE = {name: text for name, text in TEXTS.items() if name.startswith("hvd_bert/")}


def importing(texts: dict[str, str], packages: Iterable[str], indent: str = r"[ ]*") -> list[str]:
    """The files with an import of one of these packages. `indent`: "" for those that run with the file's own import."""
    statement = re.compile(rf"^{indent}(?:import|from) (?:{'|'.join(packages)})\b", re.MULTILINE)
    return [name for name, text in texts.items() if statement.search(text)]


def without(texts: dict[str, str], *folders: str) -> dict[str, str]:
    at_home = tuple(f"hvd_bert/{folder}" for folder in folders)
    return {name: text for name, text in texts.items() if not name.startswith(at_home)}


def test_horovod_is_imported_at_home_only():
    libraries, package = ("horovod", "mpi4py"), without(PACKAGE, "tools/doctor/probes")  # which holds programs as text
    assert importing(package, libraries, indent="") == [], "importing starts nothing"
    home = ("distributed/", "strategies/horovod", "tools/doctor/collective")
    assert importing(without(package, *home), libraries) == []
    assert importing(package, libraries) != [], "the search finds them"


def test_launcher_variables_are_read_at_home_only():
    # DeepSpeed reads some of them itself, and must be told otherwise. A sweep starts srun within a job's allocation.
    others = without(PACKAGE, "distributed/", "strategies/deepspeed", "tools/bench/launching")
    variable = re.compile(r"""["'](?:HOROVOD|OMPI|PMI|PMIX|MV2|SLURM)_[A-Z0-9_]+["']""")
    assert {name: variable.findall(text) for name, text in others.items() if variable.search(text)} == {}


def test_only_tests_import_from_tests():
    helpers = {"tests", *(path.stem for path in (REPOSITORY / "tests").rglob("*.py"))}
    assert importing(TEXTS, helpers) == []
    assert [name for name, text in TEXTS.items() if "sys.path" in text] == []


def test_the_layout_is_as_small_as_it_was_drawn() -> None:
    """Boxes: folders and modules at the top. Arrows: imports between them."""
    graph = grimp.build_graph("hvd_bert", cache_dir=None)
    boxes = {module.split(".")[1] for module in graph.modules if "." in module}
    arrows = {
        (module.split(".")[1], imported.split(".")[1])
        for module in graph.modules - {"hvd_bert"}
        for imported in graph.find_modules_directly_imported_by(module) - {"hvd_bert"}
    }
    between = {(box, other) for box, other in arrows if box != other}
    assert len(boxes) <= 28 and len(between) <= 145, f"{len(boxes)} boxes, {len(between)} arrows"
