"""A run's settings: the dataclasses that become the command line (`command_line.py`) and train_config.yaml."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from hvd_bert.config.checkpoints import CheckpointArguments
from hvd_bert.config.data import DEFAULT_DATASET, DataArguments
from hvd_bert.config.flag import all_flags, require
from hvd_bert.config.model import DEFAULT_MODEL, ModelArguments
from hvd_bert.config.parallel import STRATEGIES, ParallelArguments
from hvd_bert.config.profiling import ProfilingArguments
from hvd_bert.config.tasks import TASKS
from hvd_bert.config.training import SCHEDULES, TrainArguments

__all__ = [
    "DEFAULT_DATASET",
    "DEFAULT_MODEL",
    "FLAGS",
    "PACKAGE",
    "SCHEDULES",
    "SECTIONS",
    "STRATEGIES",
    "TASKS",
    "CheckpointArguments",
    "Config",
    "DataArguments",
    "ModelArguments",
    "ParallelArguments",
    "ProfilingArguments",
    "TrainArguments",
]

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass
class Config:
    """All settings of a run, one dataclass per topic."""

    model: ModelArguments
    data: DataArguments
    train: TrainArguments
    checkpoint: CheckpointArguments
    parallel: ParallelArguments
    profiling: ProfilingArguments

    def __post_init__(self) -> None:
        without_horovod = self.profiling.timeline is not None and self.parallel.strategy != "horovod"
        strategy = self.parallel.strategy
        only_horovod = f"--timeline_file works only with --strategy horovod, not with {strategy}. Use --profile."
        require(not without_horovod, only_horovod)
        fp16_on_zero = self.parallel.strategy == "deepspeed" and self.train.fp16
        require(not fp16_on_zero, "--fp16 is not supported with --strategy deepspeed. Use --bf16.")
        for name in ("torch_compile", "gradient_checkpointing"):
            given = strategy == "dp" and getattr(self.train, name)
            require(not given, f"--{name} is not supported with --strategy dp, which copies the layers. Use ddp.")
        ordered = self.train.deterministic and self.parallel.num_groups > 1
        require(not ordered, "--num_groups: --deterministic sends all gradients as one group. Leave one of them out.")

    def evaluates_after_step(self, step: int, steps_per_epoch: int, total_steps: int) -> bool:
        """Whether to evaluate after optimizer step `step`, including the last one if the best model is kept: else the
        final model is evaluated once it is saved."""
        last = self.checkpoint.load_best_model_at_end and step == total_steps
        return last or self.train.evaluates_after(step, steps_per_epoch, total_steps)

    def as_flat(self) -> dict[str, Any]:
        """All settings under their flag names."""
        return {name: value for part in asdict(self).values() for name, value in part.items()}

    def save(self, path: Path) -> None:
        """Write the resolved settings as YAML that `--config` reads back."""
        path.write_text(yaml.safe_dump(self.as_flat(), sort_keys=False), encoding="utf-8")


SECTIONS: list[Any] = [
    ModelArguments,
    DataArguments,
    TrainArguments,
    CheckpointArguments,
    ParallelArguments,
    ProfilingArguments,
]
FLAGS = all_flags(SECTIONS)
