"""The disk space that a checkpoint needs, calculated from the sizes of its tensors."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from hvd_bert.config.settings import Config
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import GIB, MIB
from hvd_bert.storage.writing import first_existing


def gib(count: float) -> str:
    """Format a number of bytes in GiB, or in MiB up to 0.1 GiB."""
    return f"{count / GIB:,.2f} GiB" if count > GIB / 10 else f"{count / MIB:.2f} MiB"


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the size of all `tensors` together in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def checkpoint_bytes(config: Config, model: nn.Module) -> int:
    """Return the size of a checkpoint of `model` in bytes.

    It has the weights and, without --save_only_model, the optimizer's moments and any averaged weights.
    """
    weights = tensor_bytes(model.state_dict().values())
    if config.checkpoint.save_only_model:
        return weights
    moments = 1 if config.train.optim == "lars" else 2
    trained = tensor_bytes(weight for weight in model.parameters() if weight.requires_grad)
    return weights * (1 + bool(config.train.ema_decay)) + moments * trained


def check(config: Config, model: nn.Module, step: int) -> None:
    """Raise UserError if the output folder's disk has no space for a checkpoint or, if none is saved, the model.

    `step`: the step from which the training resumes. At 0, the space of an earlier run's checkpoints counts as free,
    since the run removes them first.
    """
    saves = config.checkpoint.save_steps or config.checkpoint.load_best_model_at_end
    need = checkpoint_bytes(config, model) if saves else tensor_bytes(model.state_dict().values())
    files, folder = "a checkpoint" if saves else "the model", Path(config.train.output_dir or "runs")
    removed = () if step else folder.glob("checkpoint-*/*")
    free = shutil.disk_usage(first_existing(folder)).free + sum(file.lstat().st_size for file in removed)
    if free < need:
        raise UserError(
            f"The disk of --output_dir has {gib(free)} free, but {files} takes {gib(need)}. Make space, use a"
            " folder on another disk, or save less (--save_only_model)."
        )
