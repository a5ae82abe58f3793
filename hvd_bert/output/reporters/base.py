"""`Reporter`, the interface of --report_to's libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

from hvd_bert.config.training import REPORTERS
from hvd_bert.errors import UserError

Settings = Mapping[str, str | int | float | bool]
Samples = Sequence[Mapping[str, Any]]  # rows of eval_samples.json


class Reporter(ABC):
    """Sends rank 0's metrics to a library. Methods may raise any exception: `MetricsLogger` warns and stops using it.

    `title`: the reporter's name in that warning.
    """

    title: ClassVar[str]

    @classmethod  # noqa: B027  not abstract, since most libraries need neither a server nor an account
    def check(cls) -> None:
        """Override to raise UserError if the library would refuse a run, for example without a login.

        Must not change anything.
        """

    def resumed(self, step: int) -> None:  # noqa: B027  not abstract, since most libraries cannot discard values
        """Override to discard values of steps after `step`, from which the run resumes. Called before `settings`."""

    @abstractmethod
    def settings(self, settings: Settings) -> None:
        """Record the run's settings. Called once, also when a run resumes."""

    @abstractmethod
    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record a step's values by name. Names start with a group, as in train/loss."""

    @abstractmethod
    def samples(self, step: int, samples: Samples) -> None:
        """Record sample answers of an evaluation at step `step`."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Write the remaining values. `finished`: whether the run is complete, so that it cannot be resumed."""


def check_reporters(names: Sequence[str]) -> None:
    """Raise UserError if a reporter's package is missing or would refuse a run. A package has its reporter's name."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # origin is None for a mere folder, such as the output folder wandb
            raise UserError(f"--report_to {name}: the package {name} is not installed. Run `pip install .[{name}]`.")
        resolve_name(REPORTERS[name][0]).check()


def open_reporters(names: Sequence[str], folder: Path) -> list[Reporter]:
    """Start the reporters `names`. Raises OSError if a file cannot be written, and UserError if a library refuses."""
    return [resolve_name(REPORTERS[name][0])(folder) for name in names]
