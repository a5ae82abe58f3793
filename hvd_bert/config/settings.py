"""A run's settings: dataclasses that define the flags of the command line and the keys of train_config.yaml."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hvd_bert.config.data import DEFAULT_DATASET, QUESTION_ANSWERING, DataArguments, ModelArguments
from hvd_bert.config.flag import LARGEST_FACTOR, flag, flag_properties, require
from hvd_bert.config.parser import name_or_path, shortened
from hvd_bert.config.strategies import HOROVOD, STRATEGIES
from hvd_bert.config.training import REDUCE_OVERHEAD, TrainArguments
from hvd_bert.hub import DEFAULT_MODEL
from hvd_bert.machine import MAX_THREADS

PACKAGE = Path(__file__).resolve().parents[1]

_checkpoints = partial(flag, "checkpoints", may_change_on_resume=True)
_distributed = partial(flag, "distributed", may_change_on_resume=True)
_profiling = partial(flag, "profiling", may_change_on_resume=True)


def _steps(text: str) -> range:
    first, last = text.split(":")
    return range(int(first), int(last) + 1)


def _first_and_last(text: str) -> str:
    if not (re.fullmatch(r"[1-9][0-9]{0,8}:[1-9][0-9]{0,8}", text) and _steps(text)):
        raise argparse.ArgumentTypeError(f"{shortened(repr(text))} must be the first and the last step, as in 11:30")
    return text


@dataclass(frozen=True)
class CheckpointArguments:
    save_steps: int = _checkpoints(
        500, "Write a checkpoint every N steps and at the end; 0: only when a signal stops the run.", minimum=0
    )
    save_total_limit: int = _checkpoints(
        2, "Number of newest checkpoints to keep; --load_best_model_at_end keeps the best one in addition.", minimum=1
    )
    save_only_model: bool = _checkpoints(
        False,
        "Save only the model, a third of the size; it cannot be resumed. A signal still saves a whole checkpoint.",
    )
    resume_from_checkpoint: str | None = _checkpoints(
        None,
        "Resume from this checkpoint folder, or from the newest in --output_dir (latest).",
        default_text="the newest in --output_dir if the run there is unfinished",
        metavar="FOLDER|latest",
        parse=name_or_path,
        chooses_start=True,
    )
    load_best_model_at_end: bool = _checkpoints(False, "Keep the model of the best evaluation instead of the last one.")
    metric_for_best_model: str | None = _checkpoints(
        None,
        "Metric that decides which model is best, for example f1, exact_match, accuracy or eval_loss.",
        default_text="f1, or the first metric of a custom task",
        may_change_on_resume=False,
    )
    early_stopping_patience: int | None = _checkpoints(
        None, "Stop after N evaluations in a row without an improvement.", default_text="never", minimum=1
    )

    requeue: str = _distributed(
        "auto",
        "After a signal: requeue the Slurm job, if it allows this, has a time limit and made progress (auto), or not.",
        choices=("auto", "no"),
    )
    elastic: bool = _distributed(
        False, "Horovod elastic: continue after the last finished step if hosts are lost or added (needs its launcher)."
    )

    def __post_init__(self) -> None:
        both = self.load_best_model_at_end and self.save_steps == 0
        require(not both, "--load_best_model_at_end needs checkpoints: --save_steps must not be 0.")


@dataclass(frozen=True)
class ParallelArguments:
    strategy: str = _distributed(
        "ddp" if STRATEGIES["horovod"].missing else "horovod",
        "Parallel strategy; dp is one process with several GPUs, none is a single process.",
        default_text="horovod; ddp if Horovod is not installed",
        choices=tuple(STRATEGIES),
    )
    zero_stage: int = _distributed(
        2, "DeepSpeed: shard the optimizer (1), also the gradients (2).", choices=(1, 2), owner="deepspeed"
    )
    fp16_allreduce: bool = _distributed(
        False,
        "Horovod: send gradients as fp16, half the bytes; a step whose gradients overflow is skipped.",
        owner="horovod",
        may_change_on_resume=False,
    )
    bf16_allreduce: bool = _distributed(
        False,
        "Horovod: send gradients as bf16, half the bytes; sums are rounded to bf16, too.",
        owner="horovod",
        may_change_on_resume=False,
    )
    num_groups: int = _distributed(
        0, "Horovod: send gradients in at most N groups of layers; 0: do not group.", owner="horovod", minimum=0
    )
    num_threads: int | None = _distributed(
        None,
        "CPU threads per rank.",
        default_text="OMP_NUM_THREADS, else the rank's share of its cores",
        minimum=1,
        maximum=MAX_THREADS,
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            owner = flag_properties(f).owner
            others = owner not in ("", self.strategy) and getattr(self, f.name) != f.default
            require(not others, f"--{f.name} works only with --strategy {owner}, not with {self.strategy}.")
        both = self.fp16_allreduce and self.bf16_allreduce
        require(not both, "--fp16_allreduce and --bf16_allreduce are both given: choose one.")


@dataclass(frozen=True)
class ProfilingArguments:
    # --timeline_file exists because horovodrun on Python 3.11 takes --timeline, even after the program's name, for an
    # ambiguous prefix of its own flags.
    timeline: str | None = _profiling(
        None,
        "Record Horovod's timeline of --timeline_steps in this file; under horovodrun write --timeline_file.",
        default_text="no recording",
        aliases=("--timeline_file", "--timeline-file"),
        metavar="FILE",
        parse=name_or_path,
    )
    timeline_steps: str = _profiling(
        "11:30", "First and last step to record, both included.", metavar="FIRST:LAST", parse=_first_and_last
    )
    profile: bool = _profiling(
        False, "Record --timeline_steps with torch's profiler: trace/rank-N.json.gz per rank in --output_dir."
    )
    peak_tflops: float | None = _profiling(
        None,
        "Peak TFLOP/s of one device in this training's precision, for the MFU.",
        default_text="the vendor's figure for known GPUs, none for CPUs",
        above=0,
        maximum=LARGEST_FACTOR,
    )

    @property
    def steps_to_record(self) -> range:
        """The steps (1, 2, ...) to record; empty without --timeline_file and --profile."""
        return _steps(self.timeline_steps) if self.timeline or self.profile else range(0)


@dataclass(frozen=True)
class Config:
    """All settings of a run, one dataclass per topic."""

    model: ModelArguments
    data: DataArguments
    train: TrainArguments
    checkpoint: CheckpointArguments
    parallel: ParallelArguments
    profiling: ProfilingArguments

    def __post_init__(self) -> None:
        strategy, values = self.parallel.strategy, self.as_flat()
        row = STRATEGIES[strategy]
        for text, reason in row.refuses.items():
            flag, _, refused = text.partition("=")
            fits = str(values[flag]) != refused if refused else values[flag] == FLAGS[flag].default
            require(fits, f"--{text.replace('=', ' ')} does not work with --strategy {strategy}: {reason}")
        if row.several_gpus:
            self.train.refuse_auto(f"--strategy {strategy}")
        only_horovod = f"--timeline_file works only with --strategy horovod, not with {strategy}. Use --profile."
        require(self.profiling.timeline is None or row.world == HOROVOD, only_horovod)
        if self.train.captures_graphs:
            mode = f"--torch_compile_mode {REDUCE_OVERHEAD}"
            saves = self.train.gradient_checkpointing
            require(not saves, f"{mode} keeps all activations: not with --gradient_checkpointing. Choose one.")
            self.train.refuse_auto(mode)
        fresh = self.train.do_train and self.checkpoint.resume_from_checkpoint is None
        remedy = "--fast_dev_run trains from the start: remove --no_do_train and --resume_from_checkpoint."
        require(fresh or not self.train.fast_dev_run, remedy)
        ordered = self.train.deterministic and self.parallel.num_groups > 1
        require(not ordered, "--num_groups: --deterministic sends all gradients as one group. Leave one of them out.")

    def as_flat(self) -> dict[str, Any]:
        """Return all settings by flag name."""
        return {name: value for part in asdict(self).values() for name, value in part.items()}


def from_flags(flags: Mapping[str, Any]) -> Config:
    """Make the settings from the values of all flags. Derives values that other flags imply, such as the data set."""
    given, derived = dict(flags), dict[str, Any]()
    if given["model_name_or_path"] is None and given["config_name"] is None:
        derived["model_name_or_path"] = DEFAULT_MODEL
    has_files = given["train_file"] or given["validation_file"]
    if not given["dataset_name"] and not has_files and given["task"] == QUESTION_ANSWERING:
        derived["dataset_name"] = "squad_v2" if given["version_2_with_negative"] else DEFAULT_DATASET
    if derived.get("dataset_name", given["dataset_name"]) in ("squad_v2", "rajpurkar/squad_v2"):
        derived["version_2_with_negative"] = True
    if given["pad_to_max_length"]:
        both = given["padding"] not in ("none", "max_length")
        require(not both, f"--padding {given['padding']} and --pad_to_max_length are both given: choose one.")
        derived["padding"] = "max_length"
    if given["torch_compile_mode"] is not None:
        derived["torch_compile"] = True
    derived["pad_to_max_length"] = derived.get("padding", given["padding"]) == "max_length"
    if given["eval_steps"] is not None and given["eval_strategy"] != "no":
        derived["eval_strategy"] = "steps"
    return from_values(given | derived)


def from_values(values: Mapping[str, Any]) -> Config:
    """Make the settings from the values that `Config.as_flat` returns."""
    return Config(*(section(**{f.name: values[f.name] for f in fields(section)}) for section in SECTIONS))


def save(settings: Mapping[str, Any], path: Path) -> None:
    """Write settings (`Config.as_flat`) as a YAML file for `--config`."""
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False), encoding="utf-8")


SECTIONS: list[Any] = [
    ModelArguments,
    DataArguments,
    TrainArguments,
    CheckpointArguments,
    ParallelArguments,
    ProfilingArguments,
]
FLAGS = {f.name: flag_properties(f) for section in SECTIONS for f in fields(section)}
NAMES = {spelling: name for name, flag in FLAGS.items() for spelling in flag.spellings(name)}  # names by spelling


def in_this_version(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Adapt a run's identity (`resume.identity`) that an earlier version of hvd_bert recorded.

    Adds the defaults of flags that are newer, and drops flags that no longer exist and were off.
    """
    defaults = {f"--{name}": flag.default for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    return defaults | {name: value for name, value in identity.items() if name in defaults or value is not False}


# Properties of a run's identity that are recorded as hashes -> the plural, and the flags that name them, by priority.
HASHED = {
    "the training data": ("files", ("dataset_name", "train_file")),
    "the tokenizer": ("tokenizers", ("tokenizer_name", "model_name_or_path", "config_name")),
}
# Flags that may change the data's hash.
READING = [
    f"--{name}"
    for name, flag in FLAGS.items()
    if flag.group in ("data", "question-answering") and not flag.may_change_on_resume
]


def named(hashed: str, settings: Mapping[str, Any]) -> str:
    """Return the names of the files, or on the hub, of a property in HASHED; "" if the settings have none.

    Files are named without their folders.
    """
    plural, flags = HASHED[hashed]
    given: Any = next((value for flag in flags if (value := settings.get(flag))), [])
    names = map(str, given if isinstance(given, list | tuple) else [given])
    return ", ".join(Path(name).name if plural == "files" else name for name in names)


def read_alike(identities: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether runs with these identities read equal files as equal data."""
    return all(each.get(name) == identities[0].get(name) for name in READING for each in identities)


def difference(
    name: str, form: str, identities: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> str:
    """Describe how the property `name` differs between two runs by `form`, which has the property and both values.

    Replaces hashes by the names of the files, if the runs' settings have them.
    """
    names = [named(name, each) for each in settings] if name in HASHED else ["", ""]
    if names[0] != names[1] or not names[0]:
        return form.format(name, *(names if all(names) else (each.get(name, "unknown") for each in identities)))
    if read_alike(identities):
        return f"{name}: two different {HASHED[name][0]} named {names[0]}"
    return f"{name}: {names[0]} with other content or settings"
