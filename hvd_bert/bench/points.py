"""The points of a sweep: which trainings, of what size, in which order, and the trainer's flags for each."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hvd_bert.config import command_line
from hvd_bert.config.settings import FLAGS, STRATEGIES, Config
from hvd_bert.errors import UserError
from hvd_bert.sample import files as sample

STRONG, WEAK = "strong", "weak"
SCALINGS = {STRONG: (STRONG,), WEAK: (WEAK,), "both": (STRONG, WEAK)}
ONE_PROCESS = ("none", "dp")
PRESET = "sweep"
# Flags that name the training data; without one of them the preset is trained.
DATA_FLAGS = {"config"} | {name for name, flag in FLAGS.items() if flag.source == "training data"}
# Flags that belong to one strategy -> that strategy.
OWNERS = {name: flag.owner for name, flag in FLAGS.items() if flag.owner}
# So that steps are all that is timed and, without dropout, every strategy has the same losses. The user's flags win.
DEFAULTS = (
    *("--dropout=0", "--save_steps=0", "--no_do_eval", "--eval_strategy=no", "--logging_steps=5"),
    "--lr_scaling=none",  # one learning rate, so that losses can be compared whatever the ranks
)
# Flags that a sweep sets for each run, in all their spellings -> what to do instead.
SET_BY_SWEEP = {
    each: flag.sweep_hint for name, flag in FLAGS.items() if flag.sweep_hint for each in flag.spellings(name)
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
        """Of its folder."""
        return f"{self.strategy}-{self.ranks}-{self.scaling}-{self.repeat}"

    @property
    def setting(self) -> tuple[str, int, str]:
        """What its repeats have in common."""
        return self.strategy, self.ranks, self.scaling

    @property
    def processes(self) -> int:
        """How many of them train."""
        return 1 if self.strategy in ONE_PROCESS else self.ranks

    def __str__(self) -> str:
        unit = "GPU" if self.strategy == "dp" else "rank"
        repeat = f"{'seed' if self.by_seed else 'repeat'} {self.repeat}"
        return f"{self.strategy}, {self.ranks} {unit}{'s' * (self.ranks > 1)}, {self.scaling}, {repeat}"


@dataclass(frozen=True)
class Plan:
    """What a sweep varies, and what all its points have in common. `flags`: the trainer's, as the user gave them.

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
        """Of each run, for a message."""
        return f"{self.steps} steps" if self.epochs is None else f"{self.epochs:g} epoch{'s' * (self.epochs != 1)}"

    @property
    def names_data(self) -> bool:
        """Whether the user's flags say what is trained on."""
        return names_data(self.flags)

    def points(self, config: Config) -> list[Point]:
        """All points, in the order in which they run; `config`: what the flags come to.

        Each repeat goes through all settings, every second one backwards, so that a machine that grows slower or
        faster on the way does so for all of them alike. Raises UserError where a batch does not divide.
        """
        passes, rank_batch = config.train.gradient_accumulation_steps, config.train.per_device_train_batch_size
        settings = []
        for scaling in SCALINGS[self.scaling]:
            for strategy in self.strategies:
                for ranks in self._sizes(strategy):
                    weak = scaling == WEAK
                    global_batch = rank_batch * passes * ranks if weak else self.global_batch
                    settings.append((strategy, ranks, scaling, global_batch))
        if any(scaling == STRONG for _, _, scaling, _ in settings):
            self._check_division([ranks for _, ranks, scaling, _ in settings if scaling == STRONG], passes)
        return [
            Point(strategy, ranks, scaling, repeat, global_batch, by_seed=bool(self.seeds))
            for number, repeat in enumerate(self.seeds or range(1, self.repeats + 1))
            for strategy, ranks, scaling, global_batch in (reversed(settings) if number % 2 else settings)
        ]

    def _sizes(self, strategy: str) -> Sequence[int]:
        """A baseline is of one process; dp of several GPUs."""
        if strategy == "none":
            return [1]
        sizes = [ranks for ranks in self.ranks if ranks > 1 or strategy != "dp"]
        if not sizes:
            raise UserError("--strategies dp: it is one process with several GPUs: give --ranks 2 or more as well.")
        return sizes

    def _check_division(self, ranks: Sequence[int], passes: int) -> None:
        wrong = [number for number in sorted(set(ranks)) if self.global_batch % (number * passes)]
        if wrong:
            each = f" of {passes} passes a step" if passes > 1 else ""
            fits = math.lcm(*(number * passes for number in ranks))
            raise UserError(
                f"--global_batch {self.global_batch} does not divide over {' or '.join(map(str, wrong))} ranks{each}:"
                f" give a multiple of {fits}, other --ranks, or --scaling weak."
            )

    def trainer_flags(self, point: Point, passes: int, folder: Path) -> list[str]:
        """The words after `python -m hvd_bert.train` for a point; `passes`: forward and backward passes of a step."""
        own = [
            f"--strategy={point.strategy}",
            *self.length_flags(),
            *([f"--seed={point.repeat}"] if point.by_seed else []),
            f"--per_device_train_batch_size={point.global_batch // (point.ranks * passes)}",
            f"--output_dir={folder}",
            "--overwrite_output_dir",  # the folder has the log by then
        ]
        return [*self.flags_of(point.strategy), *own]

    def length_flags(self) -> list[str]:
        """The trainer's flags for the length of a run."""
        if self.epochs is None:
            return [f"--max_steps={self.steps}"]
        return ["--max_steps=-1", f"--num_train_epochs={self.epochs}"]  # -1: also if the --config file limits the steps

    def flags_of(self, strategy: str) -> list[str]:
        """The trainer's flags that all points of a strategy have."""
        held = self._divided
        others = [f"--{name}={default}" for name, default in held.undone.items() if OWNERS[name] != strategy]
        return [*self.common_flags(), *others, *held.owned.get(strategy, ())]

    def common_flags(self) -> list[str]:
        """The trainer's flags that all points have."""
        return with_defaults(self._divided.common, self.threads)

    def owned_flags(self) -> dict[str, list[str]]:
        """Flags that belong to one strategy, by those that own some; also of strategies that are not swept."""
        return self._divided.owned

    @cached_property
    def _divided(self) -> _Divided:
        return _divide(self.flags)


@dataclass(frozen=True)
class _Divided:
    """The user's flags by who may have them. `owned`: strategy -> its own; `undone`: flags of `owned` that the --config
    file sets, so that the other strategies must be given their defaults."""

    common: list[str]
    owned: dict[str, list[str]]
    undone: dict[str, Any]


def _divide(flags: Sequence[str]) -> _Divided:
    """Raises UserError for a --config that cannot be read. Values are not checked: the trainer's parser does that."""
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--config", nargs="?")
    file = chooser.parse_known_args(flags)[0].config
    from_file = command_line.load_yaml(file) if file else {}
    defaults = {name: FLAGS[name].default for name in OWNERS}
    # A finished run's train_config.yaml names all flags: only those that differ from the default count.
    in_file = {name: from_file[name] for name in OWNERS if from_file.get(name, defaults[name]) != defaults[name]}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in OWNERS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", default=argparse.SUPPRESS)
    given, common = parser.parse_known_args(flags)
    owned: dict[str, list[str]] = {}
    for name, value in (in_file | vars(given)).items():
        owned.setdefault(OWNERS[name], []).append(f"--{name}" if value is None else f"--{name}={value}")
    return _Divided(common, owned, {name: defaults[name] for name in in_file})


def _check_owned(plan: Plan) -> None:
    """Raise UserError for a flag that belongs to one strategy where its value is wrong, or that one is not swept."""
    for owner, flags in plan.owned_flags().items():
        command_line.parse([*flags, f"--strategy={owner}"], show_help=False)
        if owner in plan.strategies:
            continue
        try:
            command_line.parse([*flags, f"--strategy={plan.strategies[0]}"], show_help=False)
        except UserError as error:
            raise UserError(f"{error} Add {owner} to --strategies, or leave the flag out.") from None


def check_flags(plan: Plan) -> tuple[Config, dict[str, str]]:
    """The settings that all points share, and the strategies that cannot take them -> why.

    Raises UserError for what no strategy can take: a flag that is none, or of a strategy that is not swept; a file that
    is not there.
    """
    check_own(plan.flags, SET_BY_SWEEP, "a sweep")
    if "per_device_train_batch_size" in command_line.names_of(plan.flags) and plan.scaling == STRONG:
        raise UserError(
            "--per_device_train_batch_size: with --scaling strong the batch of a rank is --global_batch over the ranks;"
            " give --global_batch, or --scaling weak."
        )
    if plan.seeds and "seed" in command_line.names_of(plan.flags):
        raise UserError("--seed: --seeds sets it for each run. Give one of the two flags.")
    _check_owned(plan)
    configs, refused = {}, {}
    for strategy in plan.strategies:
        try:
            configs[strategy] = command_line.parse(
                [*plan.flags_of(strategy), f"--strategy={strategy}", *plan.length_flags()], show_help=False
            )
        except UserError as error:
            refused[strategy] = str(error)
    if not configs:
        raise UserError(refused[plan.strategies[0]])
    config = next(iter(configs.values()))
    check_files(config)
    return config, refused


def names_data(flags: Sequence[str]) -> bool:
    """Whether the trainer's flags say what is trained on."""
    return bool(command_line.names_of(flags) & DATA_FLAGS)


def with_defaults(flags: Sequence[str], threads: int | None, defaults: Sequence[str] = DEFAULTS) -> list[str]:
    """The trainer's flags as the user gave them, behind those that they win over; `threads`: of a rank."""
    preset = [] if names_data(flags) else [f"--config={PRESET}"]
    return [*preset, *defaults, *([] if threads is None else [f"--num_threads={threads}"]), *flags]


def check_own(flags: Sequence[str], own: Mapping[str, str], who: str) -> None:
    """Raise UserError for a flag of the trainer that `who` gives itself; `own`: those, and what to do instead."""
    for name in sorted(command_line.names_of(flags) & own.keys()):
        raise UserError(f"--{name}: {who} sets it for each run: {own[name]}.")


def check_files(config: Config) -> None:
    """Raise UserError for a file of questions that is not there."""
    for name in ("train_file", "validation_file"):
        path = getattr(config.data, name)
        if path and not sample.located(path).is_file():
            raise UserError(f"--{name} {path}: no such file.")


def check_strategies(names: Sequence[str]) -> tuple[str, ...]:
    """Raises UserError for one that is none."""
    for name in names:
        if name not in STRATEGIES:
            raise UserError(f"--strategies {name}: no such strategy. There are: {', '.join(STRATEGIES)}.")
    return tuple(dict.fromkeys(names))
