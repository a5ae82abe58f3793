"""The trainer's flags of runs that a command starts: defaults, those that the command sets, and the data's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_bert.config import command_line
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.errors import UserError

PRESET = "sweep"
# Flags that belong to one strategy -> that strategy.
OWNERS = {name: flag.owner for name, flag in FLAGS.items() if flag.owner}
# Flags that name the training data. Without any of them the preset is trained.
DATA_FLAGS = {"config", "task", "dataset_name", "train_file"}
# Only steps are timed and, without dropout, all strategies have the same losses. The user's flags override these.
DEFAULTS = (
    "--dropout=0",
    "--save_steps=0",
    "--no_do_eval",
    "--eval_strategy=no",
    "--logging_steps=5",
    "--lr_scaling=none",  # the same learning rate for any number of ranks, so that losses can be compared
)
FROM_START = "each run starts from scratch, in its own folder below --out"
DISTORTS_TIMES = "recording would distort the measured times"
# Flags that a sweep sets for each run -> what to do instead.
SET_BY_SWEEP = {
    **{name: FROM_START for name, flag in FLAGS.items() if flag.chooses_start},
    # --peak_tflops is no recording, and the MFU needs it.
    **{name: DISTORTS_TIMES for name, flag in FLAGS.items() if flag.group == "profiling" and name != "peak_tflops"},
    "output_dir": "name the folder of all runs with --out",
    "do_train": "each run trains",
    "num_train_epochs": "give --steps or --epochs",
    "max_steps": "give --steps",
    "fast_dev_run": "whole runs are compared",
    "elastic": "the ranks of a point must not change",
    "strategy": "name them with --strategies",
}


def names_data(flags: Sequence[str]) -> bool:
    """Whether the trainer's flags name the training data."""
    return bool(command_line.flag_names(flags) & DATA_FLAGS)


def with_defaults(flags: Sequence[str], threads: int | None, defaults: Sequence[str] = DEFAULTS) -> list[str]:
    """The trainer's flags: defaults, then the user's, which override them. `threads`: per rank."""
    preset = [] if names_data(flags) else [f"--config={PRESET}"]
    ours = [*defaults, *([] if threads is None else [f"--num_threads={threads}"])]
    return [*preset, *command_line.override_argv(ours, flags)]


def check_own(flags: Sequence[str], own: Mapping[str, str], who: str) -> None:
    """Raise UserError for a trainer's flag that `who` sets itself. `own`: those flags -> what to do instead."""
    for spelling in sorted(command_line.flag_names(flags)):
        for name in command_line.given_flags([f"--{spelling}"]) & own.keys():
            raise UserError(f"--{spelling}: {who} sets it for each run: {own[name]}.")


def check_files(config: Config) -> None:
    """Raise UserError if a data file or the batch is missing. A custom task may read a folder."""
    config.train.refuse_auto("runs that are compared")
    for name in ("train_file", "validation_file"):
        missing = [file.path for file in config.data.files(name) if not Path(file.path).exists()]
        if missing:
            raise UserError(f"--{name} {missing[0]}: no such file or folder. Check the path.")
