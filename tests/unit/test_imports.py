"""The package's shape: imports point one way, and Horovod and the launcher's variables stay where they belong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hvd_bert

PACKAGE = Path(hvd_bert.__file__).parent

# The way a question travels. A module imports only from modules above it; a new module takes its place here.
ORDER = [
    "__init__", "errors", "machine", "rendering.__init__", "rendering.table", "rendering.style", "rendering.page",
    "startup", "config.__init__", "config.settings", "config.command_line",
    "model.__init__", "model.cpu.__init__", "model.cpu.malloc", "distributed.__init__", "distributed.launch",
    "distributed.world", "monitoring.__init__", "monitoring.process_usage", "distributed.rendezvous",
    "distributed.watchdog", "distributed.horovod_world", "distributed.torch_world", "distributed.joining",
    "distributed.runner", "monitoring.gpu_usage", "data.__init__", "data.hub", "data.squad", "data.cache",
    "data.tokenization", "data.windows", "data.balance", "data.batch_plan", "data.collate", "data.prefetch",
    "model.cpu.dropout", "model.cpu.linear", "model.cpu.bmm", "model.attention", "model.bert", "training.__init__",
    "training.optim", "strategies.__init__", "strategies.base", "strategies.horovod", "strategies.ddp",
    "strategies.fsdp", "strategies.deepspeed", "strategies.dp", "strategies.table", "evaluation.__init__",
    "evaluation.postprocess", "evaluation.squad_metric", "training.inputs", "evaluation.evaluator",
    "training.metrics_log", "training.meter", "model.flops", "model.peaks", "training.breakdown", "training.state",
    "checkpoint.__init__", "checkpoint.files", "checkpoint.resume", "checkpoint.run_folder", "checkpoint.saving",
    "distributed.signals", "timeline.__init__", "timeline.words", "timeline.rows", "timeline.reader",
    "timeline.spans", "monitoring.profiling.__init__", "monitoring.profiling.clocks", "monitoring.profiling.trace",
    "monitoring.profiling.recording", "predict.__init__", "predict.answering", "predict.__main__", "train.__init__",
    "train.loop", "train.__main__", "bench.__init__", "bench.flags", "bench.peak", "bench.workload", "bench.measure",
    "bench.speed", "doctor.__init__", "doctor.report", "doctor.probes", "doctor.ranks", "doctor.collective",
    "doctor.checks", "doctor.diagnosis", "doctor.__main__", "report.__init__", "runs.__init__", "runs.run",
    "runs.reading", "report.alike", "report.comparison", "report.projection", "report.plots",
    "report.content", "report.__main__", "bench.points", "bench.launching", "bench.record",
    "bench.one_run", "bench.sweep", "bench.__main__", "tune.__init__", "tune.knobs", "tune.search", "tune.runs",
    "tune.words", "tune.__main__", "timeline.steps", "timeline.figures", "timeline.analysis", "timeline.advice",
    "timeline.content", "timeline.plots", "timeline.__main__", "sample.__init__", "sample.dice", "sample.themes",
    "sample.vocabulary", "sample.names", "sample.passages", "sample.generate",
]  # fmt: skip

HOROVOD_AT_HOME = (
    "distributed.horovod_world", "distributed.torch_world", "distributed.rendezvous", "distributed.runner",
    "strategies.horovod", "doctor.collective",
)  # fmt: skip
LAUNCHER_VARIABLE = re.compile(r"(HOROVOD|OMPI|PMI|PMIX|MV2|SLURM)_[A-Z0-9_]+")


def path_of(module: str) -> Path:
    return PACKAGE / (module.replace(".", "/") + ".py")


MODULES = [module for module in ORDER if path_of(module).is_file()]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def imported_names(node: ast.AST) -> Iterator[str]:
    """Full names that an import statement brings; `from a import b` gives a.b, which may be a module or not."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "the package is imported by its full name"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_modules(module: str) -> set[str]:
    """Modules of the package that `module` imports, wherever in it: at the top, in a function, for types only."""
    found = set()
    for name in (name for node in ast.walk(tree(module)) for name in imported_names(node)):
        top, *parts = name.split(".")
        if top != "hvd_bert":
            continue
        candidates = [".".join(parts), ".".join(parts[:-1])]  # a module, or a name in one
        candidates += [".".join(filter(None, [candidate, "__init__"])) for candidate in candidates]
        module_of_it = next((candidate for candidate in candidates if candidate in ORDER), None)
        assert module_of_it, f"{module} imports {name}, which is not in ORDER"
        found.add(module_of_it)
    return found


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: function bodies do not."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_import(child)


def brings(nodes: Iterator[ast.AST], *packages: str) -> bool:
    return any(name.split(".")[0] in packages for node in nodes for name in imported_names(node))


def test_every_module_has_its_place():
    found = {str(path.relative_to(PACKAGE).with_suffix("")).replace("/", ".") for path in PACKAGE.rglob("*.py")}
    assert len(set(ORDER)) == len(ORDER)
    assert found - set(ORDER) == set(), "place it in ORDER, above the first that imports it"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    above = set(ORDER[: ORDER.index(module)])
    assert own_modules(module) <= above


@pytest.mark.parametrize("module", MODULES)
def test_horovod_is_imported_at_home_only(module):
    assert not brings(at_import(tree(module)), "horovod", "mpi4py"), "importing must not start anything"
    if not module.startswith(HOROVOD_AT_HOME):
        assert not brings(ast.walk(tree(module)), "horovod", "mpi4py")


# DeepSpeed reads some of them itself, and must be told otherwise.
READERS = (
    "distributed.launch", "distributed.horovod_world", "distributed.rendezvous", "distributed.watchdog",
    "strategies.deepspeed",
)  # fmt: skip


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith(READERS)])
def test_launcher_variables_are_read_at_home_only(module):
    texts = [node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant)]
    assert [text for text in texts if isinstance(text, str) and LAUNCHER_VARIABLE.fullmatch(text)] == []


def test_the_checks_above_see_what_is_there():
    assert "data.collate" in own_modules("train.loop")
    assert "data.windows" in own_modules("training.inputs")  # from hvd_bert.data import windows
    assert "__init__" in own_modules("checkpoint.run_folder")  # from hvd_bert import __version__
    assert brings(ast.walk(tree("distributed.horovod_world")), "horovod")
    assert brings(ast.walk(tree("strategies.horovod")), "horovod")
    texts = [node.value for node in ast.walk(tree("distributed.launch")) if isinstance(node, ast.Constant)]
    assert "SLURM_PROCID" in texts
    assert LAUNCHER_VARIABLE.fullmatch("SLURM_PROCID")


def test_importing_the_trainer_starts_nothing():
    program = "import sys, hvd_bert.train; print({'horovod', 'mpi4py'} & {name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "set()\n"
