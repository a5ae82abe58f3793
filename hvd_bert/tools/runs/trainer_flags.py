"""The trainer's flags in commands that start runs: defaults, flags that the command sets itself, data flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_bert.config import command_line
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.errors import UserError

PRESET = "sweep"
# Strategy-specific flag -> its strategy.
OWNERS = {name: flag.owner for name, flag in FLAGS.items() if flag.owner}
# Flags that name the training data. Without any of them, PRESET is trained.
DATA_FLAGS = {"config", "task", "dataset_name", "train_file"}
# Time only steps, and make losses comparable between strategies. The user's flags override these defaults.
DEFAULTS = (
    "--dropout=0",
    "--save_steps=0",
    "--no_do_eval",
    "--eval_strategy=no",
    "--logging_steps=5",
    "--lr_scaling=none",  # losses can be compared only at the same learning rate
)
FROM_START = "each run starts from scratch, in its own folder below --out"
DISTORTS_TIMES = "recording would distort the measured times"
# Flag that a sweep sets for each run -> reason or remedy.
SET_BY_SWEEP = {
    **{name: FROM_START for name, flag in FLAGS.items() if flag.chooses_start},
    # --peak_tflops records nothing, and the MFU needs it.
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
    """Return whether the trainer's flags name the training data."""
    return bool(command_line.flag_names(flags) & DATA_FLAGS)


def with_defaults(flags: Sequence[str], threads: int | None, defaults: Sequence[str] = DEFAULTS) -> list[str]:
    """Complete the user's flags: add PRESET if they name no data, and --num_threads and `defaults` if not given.

    `threads`: threads per rank; None: the trainer chooses.
    """
    preset = [] if names_data(flags) else [f"--config={PRESET}"]
    ours = [*defaults, *([] if threads is None else [f"--num_threads={threads}"])]
    return [*preset, *command_line.override_argv(ours, flags)]


def check_own(flags: Sequence[str], own: Mapping[str, str], who: str) -> None:
    """Raise UserError if `flags` include a flag that the command `who` sets itself. `own`: remedy per flag."""
    for spelling in sorted(command_line.flag_names(flags)):
        for name in command_line.given_flags([f"--{spelling}"]) & own.keys():
            raise UserError(f"--{spelling}: {who} sets it for each run: {own[name]}.")


def check_files(config: Config) -> None:
    """Raise UserError if a data file is missing or the batch size is "auto".

    A folder counts as a file, since a custom task may read one.
    """
    config.train.refuse_auto("runs that are compared")
    for name in ("train_file", "validation_file"):
        missing = [file.path for file in config.data.files(name) if not Path(file.path).exists()]
        if missing:
            raise UserError(f"--{name} {missing[0]}: no such file or folder. Check the path.")
