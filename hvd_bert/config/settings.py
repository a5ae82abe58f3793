"""A run's settings: the dataclasses that become the command line (`command_line.py`) and train_config.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from hvd_bert.config.data import DEFAULT_DATASET, DEFAULT_MODEL, TASKS, DataArguments, ModelArguments
from hvd_bert.config.flag import LARGEST_FACTOR, MAX_THREADS, all_flags, check_ranges, flag, properties_of, require
from hvd_bert.config.training import SCHEDULES, TrainArguments

# Those that are defined elsewhere are the settings, too.
__all__ = [
    "DEFAULT_DATASET", "DEFAULT_MODEL", "FLAGS", "PACKAGE", "SCHEDULES", "SECTIONS", "STRATEGIES",
    "TASKS", "CheckpointArguments", "Config", "DataArguments", "ModelArguments", "ParallelArguments",
    "ProfilingArguments", "TrainArguments", "save",
]  # fmt: skip

PACKAGE = Path(__file__).resolve().parents[1]
# Implementations: hvd_bert.strategies.base. none: a single process.
STRATEGIES = ["horovod", "ddp", "fsdp", "deepspeed", "dp", "none"]


@dataclass
class CheckpointArguments:
    save_steps: int = flag(
        "checkpoints",
        500,
        "Write a checkpoint every N steps and at the end; 0: only when a signal stops the run.",
        may_change_on_resume=True,
        minimum=0,
    )
    save_total_limit: int = flag(
        "checkpoints",
        2,
        "Number of newest checkpoints to keep; --load_best_model_at_end keeps the best one in addition.",
        may_change_on_resume=True,
        minimum=1,
    )
    save_only_model: bool = flag(
        "checkpoints",
        False,
        "Save only the model, a third of the size; it cannot be resumed. A stop by a signal still saves everything.",
        may_change_on_resume=True,
    )
    resume_from_checkpoint: str | None = flag(
        "checkpoints",
        None,
        "Resume from this checkpoint folder, or from the newest in --output_dir (latest).",
        default_text="the newest in --output_dir if the run there is unfinished",
        metavar="FOLDER|latest",
        may_change_on_resume=True,
        chooses_start=True,
    )
    load_best_model_at_end: bool = flag(
        "checkpoints",
        False,
        "Keep the model of the best evaluation instead of the last one.",
        may_change_on_resume=True,
    )
    metric_for_best_model: str | None = flag(
        "checkpoints",
        None,
        "Metric that decides which model is best, for example f1, exact_match, accuracy or eval_loss.",
        default_text="f1; with --task text-classification accuracy",
    )
    early_stopping_patience: int | None = flag(
        "checkpoints",
        None,
        "Stop after N evaluations in a row without an improvement.",
        default_text="never",
        may_change_on_resume=True,
        minimum=1,
    )

    elastic: bool = flag(
        "distributed",
        False,
        "Horovod elastic: continue after the last finished step if hosts are lost or added (needs its launcher).",
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        both = self.load_best_model_at_end and self.save_steps == 0
        require(not both, "--load_best_model_at_end needs checkpoints: --save_steps must not be 0.")


@dataclass
class ParallelArguments:
    strategy: str = flag(
        "distributed",
        "horovod",
        "Parallel strategy; dp is one process with several GPUs, none is a single process.",
        choices=tuple(STRATEGIES),
        may_change_on_resume=True,
    )
    zero_stage: int = flag(
        "distributed",
        2,
        "DeepSpeed: shard the optimizer (1), also the gradients (2).",
        choices=(1, 2),
        owner="deepspeed",
        may_change_on_resume=True,
    )
    fp16_allreduce: bool = flag(
        "distributed",
        False,
        "Horovod: send gradients as fp16, half the bytes; a step whose gradients overflow is skipped.",
        owner="horovod",
    )
    bf16_allreduce: bool = flag(
        "distributed",
        False,
        "Horovod: send gradients as bf16, half the bytes; sums are rounded to bf16, too.",
        owner="horovod",
    )
    num_groups: int = flag(
        "distributed",
        0,
        "Horovod: send gradients in N groups, each when it is complete; 0: do not group.",
        owner="horovod",
        may_change_on_resume=True,
        minimum=0,
    )
    num_threads: int | None = flag(
        "distributed",
        None,
        "CPU threads per rank.",
        default_text="OMP_NUM_THREADS, else the rank's share of its cores",
        may_change_on_resume=True,
        minimum=1,
        maximum=MAX_THREADS,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        for f in fields(self):
            owner = properties_of(f).owner
            others = owner not in ("", self.strategy) and getattr(self, f.name) != f.default
            require(not others, f"--{f.name} works only with --strategy {owner}, not with {self.strategy}.")
        both = self.fp16_allreduce and self.bf16_allreduce
        require(not both, "--fp16_allreduce and --bf16_allreduce are both given: choose one.")


@dataclass
class ProfilingArguments:
    # horovodrun on Python 3.11 refuses --timeline, even after the program's name: it is the prefix of two of its flags.
    timeline: str | None = flag(
        "profiling",
        None,
        "Record Horovod's timeline of --timeline_steps in this file; under horovodrun write --timeline_file.",
        default_text="no recording",
        aliases=("--timeline_file", "--timeline-file"),
        metavar="FILE",
        may_change_on_resume=True,
    )
    timeline_steps: str = flag(
        "profiling",
        "11:30",
        "First and last step to record, both included.",
        metavar="FIRST:LAST",
        may_change_on_resume=True,
    )
    profile: bool = flag(
        "profiling",
        False,
        "Record --timeline_steps with torch's profiler: trace.json.gz of all ranks in --output_dir.",
        may_change_on_resume=True,
    )
    peak_tflops: float | None = flag(
        "profiling",
        None,
        "Peak TFLOP/s of one device in this training's precision, for the MFU.",
        default_text="the vendor's figure for known GPUs, none for CPUs",
        may_change_on_resume=True,
        above=0,
        maximum=LARGEST_FACTOR,
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        fits = re.fullmatch(r"[1-9][0-9]{0,8}:[1-9][0-9]{0,8}", self.timeline_steps) and self._steps()
        require(bool(fits), f"--timeline_steps {self.timeline_steps}: give the first and the last step, as in 11:30.")

    def _steps(self) -> range:
        first, last = self.timeline_steps.split(":")
        return range(int(first), int(last) + 1)

    @property
    def steps_to_record(self) -> range:
        """The steps (1, 2, ...) to record; empty without --timeline_file and --profile."""
        return self._steps() if self.timeline or self.profile else range(0)


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
        parts_averaged = strategy in ("fsdp", "deepspeed") and self.train.ema_decay > 0
        require(not parts_averaged, f"--ema_decay needs whole weights: not with --strategy {strategy}. Use ddp.")
        for name in ("torch_compile", "gradient_checkpointing"):
            given = strategy == "dp" and getattr(self.train, name)
            require(not given, f"--{name} is not supported with --strategy dp, which copies the layers. Use ddp.")
        if strategy == "dp":
            self.train.refuse_auto("--strategy dp")
        ordered = self.train.deterministic and self.parallel.num_groups > 1
        require(not ordered, "--num_groups: --deterministic sends all gradients as one group. Leave one of them out.")

    def as_flat(self) -> dict[str, Any]:
        """All settings under their flag names."""
        return {name: value for part in asdict(self).values() for name, value in part.items()}


def save(settings: Mapping[str, Any], path: Path) -> None:
    """Write settings (`Config.as_flat`) as YAML that `--config` reads back."""
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")


SECTIONS: list[Any] = [
    ModelArguments, DataArguments, TrainArguments, CheckpointArguments, ParallelArguments, ProfilingArguments
]  # fmt: skip
FLAGS = all_flags(SECTIONS)


def of_this_version(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier version's identity, with the defaults of newer flags."""
    defaults = {f"--{name}": flag.default for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    return defaults | dict(identity)
