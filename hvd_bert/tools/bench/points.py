"""The points of a sweep, in order: a training each, with its strategy, ranks, global batch and trainer flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hvd_bert.config import command_line
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.config.strategies import ALONE, STRATEGIES
from hvd_bert.errors import UserError
from hvd_bert.tools.runs.launching import STRONG, WEAK, Point
from hvd_bert.tools.runs.trainer_flags import OWNERS, SET_BY_SWEEP, check_files, check_own, with_defaults

SCALINGS = {STRONG: (STRONG,), WEAK: (WEAK,), "both": (STRONG, WEAK)}

PointState = Literal["done", "skipped", "failed", "waiting"]


@dataclass(eq=False)
class SweepPoint(Point):
    """A training of a sweep and its result: a row of sweep.json.

    `reason`: why the point failed or was skipped. `seconds`: wall time.
    """

    scaling: str
    repeat: int  # 1, 2, ...; with --seeds, the seed
    global_batch: int
    state: PointState = "waiting"
    reason: str = ""
    seconds: float | None = None
    windows_per_s: float | None = None
    command: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Name of the point's folder."""
        return f"{self.strategy}-{self.ranks}-{self.scaling}-{self.repeat}"

    @property
    def setting(self) -> tuple[str, int, str]:
        """Strategy, ranks and scaling, which are the same for all repeats."""
        return self.strategy, self.ranks, self.scaling


class SweepPlan(argparse.Namespace):
    """The flags of a sweep. `flags`: the trainer's flags that the user gave.

    `threads`: threads per rank; None if the trainer chooses. `epochs` replaces `steps`. `seeds` replaces `repeats`:
    one run per seed.
    """

    strategies: list[str]
    ranks: list[int]
    scaling: str
    repeats: int
    seeds: list[int]
    steps: int
    epochs: float | None
    global_batch: int
    flags: Sequence[str]
    threads: int | None

    def points(self, config: Config) -> list[SweepPoint]:
        """List all points in the order of the runs. `config`: the settings that all points share.

        Each repeat runs all settings, every second repeat in reverse order, so that a drift of the machine's speed
        affects all settings equally. Raises UserError if a batch does not divide evenly.
        """
        accumulation = config.train.gradient_accumulation_steps
        weak = config.train.per_device_train_batch_size * accumulation  # weak scaling: windows per step and rank
        settings = [
            (strategy, ranks, scaling)
            for scaling in SCALINGS[self.scaling]
            for strategy in self.strategies
            for ranks in self._sizes(strategy)
        ]
        numbers = sorted({ranks for _, ranks, scaling in settings if scaling == STRONG})
        wrong = [number for number in numbers if self.global_batch % (number * accumulation)]
        if wrong:
            each = f" with {accumulation} micro-batches per step" if accumulation > 1 else ""
            fits = math.lcm(*(number * accumulation for number in numbers))
            raise UserError(
                f"--global_batch {self.global_batch} does not divide evenly over {' or '.join(map(str, wrong))}"
                f" ranks{each}: use a multiple of {fits}, or other --ranks."
            )
        return [
            SweepPoint(strategy, ranks, scaling, repeat, weak * ranks if scaling == WEAK else self.global_batch)
            for number, repeat in enumerate(self.seeds or range(1, self.repeats + 1))
            for strategy, ranks, scaling in (reversed(settings) if number % 2 else settings)
        ]

    def _sizes(self, strategy: str) -> Sequence[int]:
        """Return the numbers of ranks to run a strategy on: those of --ranks, or 1 if it runs in a single process.

        If the single process uses several GPUs, returns its numbers of GPUs: those of --ranks above 1. Raises
        UserError without such a number.
        """
        row = STRATEGIES[strategy]
        if not row.several_gpus:
            return [1] if row.world == ALONE else self.ranks
        sizes = [ranks for ranks in self.ranks if ranks > 1]
        if not sizes:
            raise UserError(f"--strategies {strategy} needs several GPUs: add 2 or more to --ranks.")
        return sizes

    def trainer_flags(self, point: SweepPoint, accumulation: int, folder: Path) -> list[str]:
        """Return the arguments of `python -m hvd_bert.train` for a point. `accumulation`: micro-batches per step."""
        own = [
            f"--strategy={point.strategy}",
            *self.length_flags(),
            *([f"--seed={point.repeat}"] if self.seeds else []),
            f"--per_device_train_batch_size={point.global_batch // (point.ranks * accumulation)}",
            "--global_batch=-1",  # replaces a value in the --config file
            f"--output_dir={folder}",
            "--overwrite_output_dir",  # the folder already holds the log
        ]
        return command_line.override_argv(self.strategy_flags(point.strategy), own)

    def length_flags(self) -> list[str]:
        """Return the trainer's flags for the length of a run."""
        if self.epochs is None:
            return [f"--max_steps={self.steps}"]
        return ["--max_steps=-1", f"--num_train_epochs={self.epochs}"]  # -1: the --config file may limit the steps

    def strategy_flags(self, strategy: str) -> list[str]:
        """Return the trainer's flags for all points of a strategy. Flags of other strategies get their defaults."""
        others = [f"--{name}={FLAGS[name].default}" for name, owner in OWNERS.items() if owner != strategy]
        return command_line.override_argv(with_defaults(self.flags, self.threads), others)

    def common_flags(self) -> list[str]:
        """Return the trainer's flags for all points, without strategy-specific flags."""
        return with_defaults(command_line.drop_flags(self.flags, OWNERS), self.threads)

    def own_flags(self, strategy: str) -> list[str]:
        """Return the flags specific to `strategy` that the user or the --config file sets."""
        own = {name: self.values[name] for name, owner in OWNERS.items() if owner == strategy}
        changed = {name: value for name, value in own.items() if value != FLAGS[name].default}
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in changed.items()]

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values of all flags of the trainer: given, from the --config file, or default. Raises UserError."""
        return command_line.read_values(self.flags)


def check_flags(plan: SweepPlan) -> tuple[Config, dict[str, str]]:
    """Check the trainer's flags for each strategy.

    Returns the settings of the first strategy that accepts them, and strategy -> reason for those that refuse them.
    Raises UserError if no strategy accepts them, for missing files, and for flags that the sweep sets itself or that
    belong to a strategy outside the sweep.
    """
    own = dict(SET_BY_SWEEP)
    if plan.scaling == STRONG:
        own["per_device_train_batch_size"] = "give --global_batch, for all ranks together, or --scaling weak"
    if plan.seeds:
        own["seed"] = "give either --seeds or --seed"
    check_own(plan.flags, own, "a sweep")
    for name, owner in OWNERS.items():
        if owner not in plan.strategies and plan.values[name] != FLAGS[name].default:
            raise UserError(
                f"--{name} works only with --strategy {owner}. Add {owner} to --strategies, or remove the flag."
            )
    configs, refused = {}, {}
    for strategy in plan.strategies:
        command_line.parse([*plan.own_flags(strategy), f"--strategy={strategy}"])  # raises if these flags conflict
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
