"""The points of a sweep: its trainings, their sizes and order, and the trainer's flags for each."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hvd_bert.config import command_line
from hvd_bert.config.parser import Parser
from hvd_bert.config.settings import FLAGS, STRATEGIES, Config
from hvd_bert.errors import UserError
from hvd_bert.tools.rendering import counted
from hvd_bert.tools.report.comparability import STRONG, WEAK

SCALINGS = {STRONG: (STRONG,), WEAK: (WEAK,), "both": (STRONG, WEAK)}
ONE_PROCESS = ("none", "dp")
PRESET = "sweep"
# Flags that name the training data. Without any of them the preset is trained.
DATA_FLAGS = {"config", "task", "dataset_name", "train_file"}
# Flags that belong to one strategy -> that strategy.
OWNERS = {name: flag.owner for name, flag in FLAGS.items() if flag.owner}
# Only steps are timed and, without dropout, all strategies have the same losses. The user's flags override these.
DEFAULTS = (
    "--dropout=0",
    "--save_steps=0",
    "--no_do_eval",
    "--eval_strategy=no",
    "--logging_steps=5",
    "--lr_scaling=none",  # the same learning rate for any number of ranks, so that losses can be compared
)
DISTORTS_TIMES = "recording would distort the measured times"
# Flags that a sweep sets for each run -> what to do instead.
SET_BY_SWEEP = {
    "output_dir": "name the folder of all runs with --out",
    "overwrite_output_dir": "name another --out",
    "do_train": "a sweep always trains",
    "num_train_epochs": "give --steps or --epochs",
    "max_steps": "give --steps",
    "fast_dev_run": "whole runs are compared",
    "resume_from_checkpoint": "an interrupted point is trained again from the start",
    "elastic": "the ranks of a point must not change",
    "strategy": "name them with --strategies",
    "timeline": DISTORTS_TIMES,
    "profile": DISTORTS_TIMES,
}


@dataclass(frozen=True)
class Point:
    """One training. `ranks`: its processes or, under dp, the GPUs of its one process."""

    strategy: str
    ranks: int
    scaling: str
    repeat: int
    global_batch: int
    by_seed: bool = False  # whether `repeat` is the seed of the run

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.strategy}-{self.ranks}-{self.scaling}-{self.repeat}"

    @property
    def setting(self) -> tuple[str, int, str]:
        """Strategy, ranks and scaling, which its repeats share."""
        return self.strategy, self.ranks, self.scaling

    @property
    def processes(self) -> int:
        """Number of processes that train."""
        return 1 if self.strategy in ONE_PROCESS else self.ranks

    def __str__(self) -> str:
        unit = "GPU" if self.strategy == "dp" else "rank"
        repeat = f"{'seed' if self.by_seed else 'repeat'} {self.repeat}"
        return f"{self.strategy}, {counted(self.ranks, unit)}, {self.scaling}, {repeat}"


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep varies, and what it keeps fixed. `flags`: the trainer's, as given by the user.

    `epochs` replaces `steps`, and `seeds` replaces `repeats`: one run per seed.
    """

    strategies: tuple[str, ...]
    ranks: tuple[int, ...]
    scaling: str
    repeats: int
    steps: int
    global_batch: int
    threads: int | None
    flags: tuple[str, ...]
    epochs: float | None = None
    seeds: tuple[int, ...] = ()

    @property
    def length(self) -> str:
        """The length of a run in words."""
        return f"{self.steps} steps" if self.epochs is None else counted(self.epochs, "epoch")

    def points(self, config: Config) -> list[Point]:
        """All points in the order in which they run. `config`: the parsed flags.

        Each repeat runs all settings, every second repeat in reverse order, so that a drift of the machine's speed
        affects all settings alike. Raises UserError if a batch does not divide evenly.
        """
        passes, rank_batch = config.train.gradient_accumulation_steps, config.train.per_device_train_batch_size
        settings = []
        for scaling in SCALINGS[self.scaling]:
            for strategy in self.strategies:
                for ranks in self._sizes(strategy):
                    weak = scaling == WEAK
                    global_batch = rank_batch * passes * ranks if weak else self.global_batch
                    settings.append((strategy, ranks, scaling, global_batch))
        numbers = sorted({ranks for _, ranks, scaling, _ in settings if scaling == STRONG})
        wrong = [number for number in numbers if self.global_batch % (number * passes)]
        if wrong:
            each = f" with {passes} passes per step" if passes > 1 else ""
            fits = math.lcm(*(number * passes for number in numbers))
            raise UserError(
                f"--global_batch {self.global_batch} does not divide evenly over {' or '.join(map(str, wrong))}"
                f" ranks{each}: use a multiple of {fits}, or other --ranks."
            )
        return [
            Point(strategy, ranks, scaling, repeat, global_batch, by_seed=bool(self.seeds))
            for number, repeat in enumerate(self.seeds or range(1, self.repeats + 1))
            for strategy, ranks, scaling, global_batch in (reversed(settings) if number % 2 else settings)
        ]

    def _sizes(self, strategy: str) -> Sequence[int]:
        """The numbers of ranks for a strategy: 1 for none, at least 2 for dp."""
        if strategy == "none":
            return [1]
        sizes = [ranks for ranks in self.ranks if ranks > 1 or strategy != "dp"]
        if not sizes:
            raise UserError("--strategies dp needs several GPUs: add 2 or more to --ranks.")
        return sizes

    def trainer_flags(self, point: Point, passes: int, folder: Path) -> list[str]:
        """The arguments of `python -m hvd_bert.train` for a point. `passes`: micro-batches per step."""
        own = [
            f"--strategy={point.strategy}",
            *self.length_flags(),
            *([f"--seed={point.repeat}"] if point.by_seed else []),
            f"--per_device_train_batch_size={point.global_batch // (point.ranks * passes)}",
            "--global_batch=-1",  # also if the --config file fixes it
            f"--output_dir={folder}",
            "--overwrite_output_dir",  # the folder already holds the log
        ]
        return command_line.override_argv(self.strategy_flags(point.strategy), own)

    def length_flags(self) -> list[str]:
        """The trainer's flags for the length of a run."""
        if self.epochs is None:
            return [f"--max_steps={self.steps}"]
        return ["--max_steps=-1", f"--num_train_epochs={self.epochs}"]  # -1: also if the --config file limits the steps

    def strategy_flags(self, strategy: str) -> list[str]:
        """The trainer's flags for all points of a strategy."""
        divided = self.divided
        others = [f"--{name}={default}" for name, default in divided.from_file.items() if OWNERS[name] != strategy]
        return [*self.common_flags(), *others, *divided.owned.get(strategy, ())]

    def common_flags(self) -> list[str]:
        """The trainer's flags for all points."""
        return with_defaults(self.divided.common, self.threads)

    @cached_property
    def divided(self) -> Divided:
        """The user's flags, by the strategies that take them. The trainer's parser checks the values later.

        Raises UserError if --config cannot be read.
        """
        chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        chooser.add_argument("--config", nargs="?")
        file = chooser.parse_known_args(self.flags)[0].config
        from_file = command_line.load_yaml(file) if file else {}
        defaults = {name: FLAGS[name].default for name in OWNERS}
        # A finished run's train_config.yaml names all flags. Only those that differ from the default count.
        in_file = {name: from_file[name] for name in OWNERS if from_file.get(name, defaults[name]) != defaults[name]}
        parser = Parser(add_help=False, allow_abbrev=False)
        for name in OWNERS:
            parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", default=argparse.SUPPRESS)
        given, common = parser.parse_known_args(self.flags)
        owned: dict[str, list[str]] = {}
        for name, value in (in_file | vars(given)).items():
            owned.setdefault(OWNERS[name], []).append(f"--{name}" if value is None else f"--{name}={value}")
        return Divided(common, owned, {name: defaults[name] for name in in_file})


@dataclass(frozen=True)
class Divided:
    """The user's flags: those of all strategies and, in `owned`, those of one. `from_file`: flags of `owned` that the
    --config file sets, with the defaults that the other strategies need instead."""

    common: list[str]
    owned: dict[str, list[str]]
    from_file: dict[str, Any]


def _check_owned(plan: SweepPlan) -> None:
    """Raise UserError if a strategy's own flag has a wrong value, or that strategy is not swept."""
    for owner, flags in plan.divided.owned.items():
        command_line.parse([*flags, f"--strategy={owner}"])
        if owner in plan.strategies:
            continue
        try:
            command_line.parse([*flags, f"--strategy={plan.strategies[0]}"])
        except UserError as error:
            raise UserError(f"{error} Add {owner} to --strategies, or remove the flag.") from None


def check_flags(plan: SweepPlan) -> tuple[Config, dict[str, str]]:
    """Return the settings that all points share, and the strategies that refuse them, with the reason.

    Raises UserError if no strategy accepts them: for unknown flags, missing files, and flags of strategies that are not
    swept.
    """
    check_own(plan.flags, SET_BY_SWEEP, "a sweep")
    if "per_device_train_batch_size" in command_line.flag_names(plan.flags) and plan.scaling == STRONG:
        raise UserError(
            "--per_device_train_batch_size: with --scaling strong the per-rank batch is --global_batch over the"
            " number of ranks. Use --global_batch, or --scaling weak."
        )
    if plan.seeds and "seed" in command_line.flag_names(plan.flags):
        raise UserError("--seed: --seeds sets it for each run. Give one of the two flags.")
    _check_owned(plan)
    configs, refused = {}, {}
    for strategy in plan.strategies:
        try:
            configs[strategy] = command_line.parse(
                [*plan.strategy_flags(strategy), f"--strategy={strategy}", *plan.length_flags()]
            )
        except UserError as error:
            refused[strategy] = str(error)
    if not configs:
        raise UserError(refused[plan.strategies[0]])
    config = next(iter(configs.values()))
    check_files(config)
    return config, refused


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
    """Raise UserError if a data file or the batch is missing. A task of one's own may read a folder."""
    config.train.refuse_auto("runs that are compared")
    for name in ("train_file", "validation_file"):
        missing = [file.path for file in config.data.files(name) if not Path(file.path).exists()]
        if missing:
            raise UserError(f"--{name} {missing[0]}: no such file or folder. Check the path.")


def check_strategies(names: Sequence[str]) -> tuple[str, ...]:
    """The strategies, each once. Raises UserError for an unknown name."""
    for name in names:
        if name not in STRATEGIES:
            raise UserError(f"--strategies {name}: unknown strategy. Choose from: {', '.join(STRATEGIES)}.")
    return tuple(dict.fromkeys(names))
