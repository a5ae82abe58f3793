"""What a start decides where the settings leave it open: a value next to the settings, which never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_bert.config.settings import Config, from_values


@dataclass(frozen=True)
class RunPlan:
    """Decisions by the names of the flags that they stand for; None: as the settings say.

    Attributes:
        output_dir: The run's folder. Before it is acquired, only that of a run that this start continues.
        overwrite_output_dir: False where this start continues a run.
        resume_from_checkpoint: "latest" where this start continues a run that has checkpoints.
        per_device_train_batch_size: The batch that fits into memory, for the value auto.
        padding: "longest" in place of "none" if the model's family takes no packed windows.
        metric_for_best_model: The task's first metric, if none is given.
    """

    output_dir: str | None = None
    overwrite_output_dir: bool | None = None
    resume_from_checkpoint: str | None = None
    per_device_train_batch_size: int | None = None
    padding: str | None = None
    metric_for_best_model: str | None = None

    @property
    def decided(self) -> dict[str, Any]:
        """The decisions, without those that were left to the settings."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def applied_to(self, config: Config) -> Config:
        """The settings that the run has with these decisions."""
        return from_values(config.as_flat() | self.decided)
