"""Horovod, launcher variables and test helpers are used only where they belong.

`lint-imports` checks the layers of the package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

import hvd_bert

PACKAGE = Path(hvd_bert.__file__).parent

HOROVOD_MODULES = ("distributed.", "strategies.horovod", "tools.doctor.collective")
LAUNCHER_VARIABLE = re.compile(r"(HOROVOD|OMPI|PMI|PMIX|MV2|SLURM)_[A-Z0-9_]+")


MODULES = sorted(str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for path in PACKAGE.rglob("*.py"))


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the full names in an import statement; `from a import b` gives a.b, whether or not b is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "the package is imported by its full name"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` that an import executes. Functions are skipped, including their decorators."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_import(child)


def imports(nodes: Iterator[ast.AST], *packages: str) -> bool:
    return any(name.split(".")[0] in packages for node in nodes for name in imported_names(node))


def test_horovod_is_imported_by_its_modules_only():
    libraries = ("horovod", "mpi4py")
    assert not [module for module in MODULES if imports(at_import(tree(module)), *libraries)], "no library may start"
    others = [module for module in MODULES if not module.startswith(HOROVOD_MODULES)]
    assert not [module for module in others if imports(ast.walk(tree(module)), *libraries)]


# The DeepSpeed strategy overrides variables that DeepSpeed reads. A sweep reads its job's allocation.
READERS = ("distributed.", "strategies.deepspeed", "tools.runs.launching")


def test_launcher_variables_are_read_by_these_modules_only():
    nodes = [node for module in MODULES if not module.startswith(READERS) for node in ast.walk(tree(module))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert [text for text in texts if LAUNCHER_VARIABLE.fullmatch(text)] == []


def test_only_tests_import_from_tests():
    helpers = {"tests", *(path.stem for path in (PACKAGE.parent / "tests").rglob("*.py"))}
    for folder in ("benchmarks", "examples", "hvd_bert", "scripts"):
        texts = {path: path.read_text(encoding="utf-8") for path in (PACKAGE.parent / folder).rglob("*.py")}
        assert texts
        assert [path for path, text in texts.items() if imports(ast.walk(ast.parse(text)), *helpers)] == []
        assert [path for path, text in texts.items() if "sys.path" in text] == []


def test_layout_stays_small() -> None:
    """Limit the number of boxes (top-level folders and modules) and of arrows (one box imports from another)."""
    graph = grimp.build_graph("hvd_bert", cache_dir=None)
    boxes = {module.split(".")[1] for module in graph.modules if "." in module}
    arrows = {
        (module.split(".")[1], imported.split(".")[1])
        for module in graph.modules - {"hvd_bert"}
        for imported in graph.find_modules_directly_imported_by(module) - {"hvd_bert"}
    }
    between = {(box, other) for box, other in arrows if box != other}
    assert len(boxes) <= 28 and len(between) <= 145, f"{len(boxes)} boxes, {len(between)} arrows"
