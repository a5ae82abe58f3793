"""The disk space that a training takes, by the sizes of its tensors, next to what is free."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from hvd_bert.config.settings import Config
from hvd_bert.data.batch_plan import BatchPlan
from hvd_bert.errors import UserError, log
from hvd_bert.storage.reading import GIB, MIB
from hvd_bert.storage.writing import first_existing


@dataclass(frozen=True)
class DiskSpace:
    """Bytes of the final `model` and of a `checkpoint`, and how many checkpoints there are at most.

    `kept`: at the end. `at_once`: while one is written, since an old one is removed afterwards.
    """

    model: int
    checkpoint: int
    kept: int
    at_once: int

    @property
    def most(self) -> int:
        """At any time."""
        return max(self.at_once * self.checkpoint, self.kept * self.checkpoint + self.model)

    def __str__(self) -> str:
        return f"{gib(self.most)} ({self.at_once} checkpoint(s) of {gib(self.checkpoint)}, model {gib(self.model)})"


def gib(count: float) -> str:
    """Bytes, for people."""
    return f"{count / GIB:,.2f} GiB" if count > GIB / 10 else f"{count / MIB:.2f} MiB"


def needed(config: Config, model: nn.Module, plan: BatchPlan) -> DiskSpace:
    """The space of a whole training of `model`."""
    train, args = config.train, config.checkpoint
    weights, slots = _bytes(model.state_dict().values()), 1 if train.optim == "lars" else 2
    moments = slots * _bytes(weight for weight in model.parameters() if weight.requires_grad)
    checkpoint = weights if args.save_only_model else weights * (1 + bool(train.ema_decay)) + moments
    steps, best = train.total_steps(plan.steps_per_epoch), args.load_best_model_at_end
    written = 0 if not args.save_steps else steps if best else math.ceil(steps / args.save_steps)
    kept = args.save_total_limit + best
    return DiskSpace(weights, checkpoint, min(written, kept), min(written, kept + 1))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check(config: Config, model: nn.Module, plan: BatchPlan, step: int) -> None:
    """Warn if the disk has too little space for the training, and raise UserError if not even for a checkpoint.

    `step`: where the training resumes, whose checkpoints stay until there are others; 0: they are removed first.
    """
    if step >= config.train.total_steps(plan.steps_per_epoch):  # only the end of a run is left
        return
    need, folder = needed(config, model, plan), Path(config.train.output_dir or "runs")
    free = shutil.disk_usage(first_existing(folder)).free
    old = [*folder.glob("checkpoint-*/*"), *folder.glob("model.safetensors")]
    in_all = free + sum(file.lstat().st_size for file in old)  # with what the run removes in time
    at_first = free if step else in_all
    first, what = (need.checkpoint, "a checkpoint") if need.kept else (need.model, "the model")
    if at_first < first:
        raise UserError(
            f"The disk of --output_dir has {gib(at_first)} free, but {what} takes {gib(first)}. Make space, use a"
            " folder on another disk, or save less (--save_only_model)."
        )
    if in_all < need.most:
        log.warning(
            f"The disk of --output_dir has {gib(in_all)} free, but the run may take {need}. Lower --save_total_limit,"
            " add --save_only_model, or use a folder on another disk."
        )
