"""The settings of the training that made a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvd_bert.config.command_line import load_yaml


def trained_settings(model: str) -> dict[str, Any]:
    """The settings by flag, from the train_config.yaml in the model's folder; empty if there is none.

    For a checkpoint they are in the folder above.
    """
    folder = Path(model)
    if folder.is_dir():
        folder = folder.resolve()  # "." and links do not have the name of a checkpoint
    for place in (folder, folder.parent) if folder.name.startswith("checkpoint-") else (folder,):
        if (place / "train_config.yaml").is_file():
            return load_yaml(str(place / "train_config.yaml"))
    return {}
