"""The reporters of `--report_to` by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvd_bert.config.training import REPORTERS
from hvd_bert.errors import UserError
from hvd_bert.output.reporters.base import Background, close


def check(names: Sequence[str]) -> None:
    """Raise UserError if a reporter's package, which has its name, is not installed, or if it would refuse a run."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # wandb's own output, a folder of its name, has no origin
            raise UserError(f"--report_to {name}: the package {name} is not installed. Run `pip install {name}`.")
    for name in names:
        _class(name).check()


def start(names: Sequence[str], folder: Path) -> list[Background]:
    """Start the reporters of a run. Raises OSError if a file cannot be written, and UserError if a library refuses."""
    started: list[Background] = []
    try:
        for name in names:
            started.append(Background(_class(name)(folder)))
    except BaseException:
        close(started, finished=False)
        raise
    return started


def _class(name: str) -> Any:
    module, _, class_name = REPORTERS[name].partition(":")
    return getattr(import_module(module), class_name)
