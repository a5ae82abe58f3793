"""The data of a run as the hub names them: data set, configuration and split, or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvd_bert.config.glue import DATASET, GLUE

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Data:
    """A training or validation set.

    `splits`: the endings of the metrics' names -> splits on the hub; empty for a file.
    """

    name: str
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_training(cls, settings: Settings) -> Data:
        return cls._of(settings, settings["train_file"], {"": settings["train_split_name"]})

    @classmethod
    def of_evaluation(cls, settings: Settings) -> Data:
        glue = GLUE.get(settings["task_name"])
        splits = {ending: split for split, ending in glue.validation.items()} if glue else None
        return cls._of(settings, settings["validation_file"], splits or {"": settings["validation_split_name"]})

    @classmethod
    def _of(cls, settings: Settings, file: str | None, splits: Mapping[str, str]) -> Data:
        if settings["task_name"]:
            return cls(DATASET, settings["task_name"], splits)
        if settings["dataset_name"]:
            return cls(settings["dataset_name"], settings["dataset_config_name"], splits)
        return cls(file or settings["task"])

    def metric(self, name: str) -> tuple[str, str | None]:
        """A metric's name without its ending, and its split."""
        ending = next((end for end in self.splits if end and name.endswith(end)), "")
        return name.removesuffix(ending), self.splits.get(ending)
