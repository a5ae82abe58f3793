"""The reporters of `--report_to` by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from hvd_bert.config.training import REPORTERS
from hvd_bert.errors import UserError
from hvd_bert.training.reporters.base import Background


def check(names: Sequence[str]) -> None:
    """Raise UserError if the package of a reporter, which has its name, is not installed."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # wandb's own output, a folder of its name, has no origin
            raise UserError(f"--report_to {name}: the package {name} is not installed. Run `pip install {name}`.")


def start(names: Sequence[str], folder: Path) -> list[Background]:
    """Start the reporters of a run. Raises OSError if a file cannot be written, and UserError if a library refuses."""
    reporters = []
    for name in names:
        module, _, class_name = REPORTERS[name].partition(":")
        reporters.append(getattr(import_module(module), class_name)(folder))
    return [Background(reporter) for reporter in reporters]
