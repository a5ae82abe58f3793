"""Restores the settings and weights of a training, to evaluate it with a custom task."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from torch import nn

from hvd_bert.config.command_line import trained_settings
from hvd_bert.config.settings import FLAGS, Config, from_flags
from hvd_bert.errors import UserError, as_user_error
from hvd_bert.model.loading import LORA_CHECKPOINT
from hvd_bert.storage.reading import open_regular

_HUB, _FILES = {"dataset_name", "dataset_config_name"}, {"train_file", "validation_file"}
_TRAINING_FLAGS = {name for name, flag in FLAGS.items() if flag.group in ("model", "data")} | {"seed"}
_TRAINING_FLAGS -= {"task", "max_eval_samples", "pad_to_max_length"}  # pad_to_max_length follows from --padding


def as_trained(config: Config) -> Config | None:
    """Return the settings; those of model, data and seed with default values come from the training to evaluate.

    --model_name_or_path names the folder of the training, and becomes the model with which the training began.

    A given --dataset_name replaces the training's data set and files. A given data file replaces the training's data
    set. Returns None if the folder has no settings of a training.
    """
    trained = trained_settings(str(config.model.model_name_or_path))
    if not trained:
        return None
    replaced: set[str] = set()
    if config.data.dataset_name:
        replaced = _HUB | _FILES
    elif config.data.train_file or config.data.validation_file:
        replaced = _HUB
    given = config.as_flat()
    unset = {name for name in _TRAINING_FLAGS - replaced if given[name] == FLAGS[name].default}
    return from_flags(
        given
        | {name: trained[name] for name in unset & trained.keys()}
        | {"model_name_or_path": trained.get("model_name_or_path")}
    )


def load_weights(model: nn.Module, folder: str) -> None:
    """Load the weights that a run saved in its folder. Raises UserError if they are missing or do not fit."""
    file = Path(folder) / "model.safetensors"
    with as_user_error(
        lambda reason: f"{file} cannot be loaded ({reason}). Name the output folder of a training with this task."
    ):
        open_regular(file).close()
        with safetensors.safe_open(file, "pt") as content:
            if any(".lora_A." in name for name in content.keys()):  # noqa: SIM118  # it is not a mapping
                raise UserError(f"{folder} {LORA_CHECKPOINT}")
        safetensors.torch.load_model(model, file)
