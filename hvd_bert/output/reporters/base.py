"""The interface of reporters (`--report_to`)."""

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
    """Sends rank 0's records to a library. A method may raise any error: `MetricsLogger` reports it."""

    title: ClassVar[str]

    @classmethod  # noqa: B027  most libraries need neither a server nor an account
    def check(cls) -> None:
        """Raise UserError if the library would refuse a run. Changes nothing."""

    def resumed(self, step: int) -> None:  # noqa: B027  most libraries discard nothing
        """Discard values of later steps: the run resumes from the checkpoint of this one. Called first, if at all."""

    @abstractmethod
    def settings(self, settings: Settings) -> None:
        """Record the run's settings. Called once per start."""

    @abstractmethod
    def scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record values of a step. Names start with a group, as in train/loss."""

    @abstractmethod
    def samples(self, step: int, samples: Samples) -> None:
        """Record sample answers of an evaluation."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """End the record. `finished`: the run is complete, so it will not be resumed."""


def check_reporters(names: Sequence[str]) -> None:
    """Raise UserError if the package of a reporter, which has the same name, is missing or would refuse a run."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # an output folder of wandb, named wandb, has no origin
            raise UserError(f"--report_to {name}: the package {name} is not installed. Run `pip install .[{name}]`.")
        resolve_name(REPORTERS[name][0]).check()


def open_reporters(names: Sequence[str], folder: Path) -> list[Reporter]:
    """Start the reporters of a run. Raises OSError if a file cannot be written, and UserError if a library refuses."""
    return [resolve_name(REPORTERS[name][0])(folder) for name in names]
