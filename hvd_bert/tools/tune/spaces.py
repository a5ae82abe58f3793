"""The settings that a tuning searches, and their values: Horovod's own, or flags of the trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hvd_bert.config import command_line
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import MIB
from hvd_bert.tools.runs.reading import Run
from hvd_bert.tools.runs.trainer_flags import SET_BY_SWEEP, check_own, with_defaults

HOROVOD, TRAINING = "horovod", "training"
Value = int | float | str
Setting = tuple[str, ...]  # NAME=VALUE for the environment, --FLAG=VALUE for the trainer. (): the user's own settings

# Name -> variable or flag, its default in Horovod 0.28.1 (horovod/common/operations.cc, global_state.h), and other
# values. The response cache is not tuned: a BERT has fewer than its 1024 tensors.
KNOBS = {
    "hierarchical": ("HOROVOD_HIERARCHICAL_ALLREDUCE=", "0", "1"),
    "cycle": ("HOROVOD_CYCLE_TIME=", "1", "0.3,3,10"),
    "fusion": ("HOROVOD_FUSION_THRESHOLD=", str(128 * MIB), f"{8 * MIB},{32 * MIB},{256 * MIB}"),
    "groups": ("--num_groups=", "0", "2,8"),
    "fp16": ("--fp16_allreduce=", "False", "True"),
}
# Space -> name -> values. In Horovod's the user's value and the default are candidates, too.
RANGES = {
    HOROVOD: {name: values for name, (_, _, values) in KNOBS.items()},
    TRAINING: {
        "learning_rate": "1e-5:1e-4:log",
        "global_batch": "16,32,64",
        "num_train_epochs": "2,3,4",
        "warmup_ratio": "0:0.2",
    },
}
# The trainer's flags of every run: the user's override the first, but not the second.
DEFAULTS = {
    HOROVOD: ("--save_steps=0", "--no_do_eval", "--eval_strategy=no", "--logging_steps=5"),  # only steps are timed
    TRAINING: ("--save_steps=0",),
}
FORCED = {HOROVOD: {"strategy": "horovod"}, TRAINING: {"eval_strategy": "epoch"}}
# A searched flag -> the flag that would override it, and the value with which it does not.
OVERRIDING = {
    "num_train_epochs": ("max_steps", "-1"),
    "warmup_ratio": ("warmup_steps", "0"),
    "per_device_train_batch_size": ("global_batch", "-1"),
}
# Flags of the trainer that are refused -> what to do instead.
_BOTH = {name: SET_BY_SWEEP[name] for name in SET_BY_SWEEP.keys() - {"num_train_epochs", "max_steps", "strategy"}}
_BOTH |= {"resume_from_checkpoint": "each run starts from scratch", "elastic": "the ranks must not change"}
_STEPS = dict.fromkeys(("num_train_epochs", "max_steps"), "give --steps")
_SCORES = dict.fromkeys(("do_eval", "eval_strategy", "eval_steps"), "the scores after each epoch are compared")
SET_BY_TUNE = {
    HOROVOD: _BOTH | _STEPS | {"strategy": "only Horovod is tuned"},
    TRAINING: _BOTH | _SCORES,
}


@dataclass(frozen=True)
class Parameter:
    """A setting to search. `word`: its variable or flag, with "=". `now`: the user's value, or the default."""

    name: str
    word: str
    now: Value
    distribution: BaseDistribution

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a list; empty for a range."""
        return getattr(self.distribution, "choices", ())

    def has_effect(self, run: Run) -> bool:
        """Whether it can change a run like this: Horovod ignores `hierarchical` on one host and without NCCL."""
        return self.name != "hierarchical" or (not run.on_cpu and 1 < run.nodes < run.ranks)


def trainer_flags(
    space: str, texts: Sequence[str], given: Sequence[str], forced: dict[str, str], threads: int | None
) -> list[str]:
    """The trainer's flags of every run that searches `texts` (--range). Raises UserError. `given`: the user's."""
    names = [text.partition("=")[0] for text in texts]
    over = {name: OVERRIDING[name] for name in names if name in OVERRIDING}
    hints = {other: f"it overrides {name}, which is searched" for name, (other, _) in over.items()}
    check_own(given, hints | SET_BY_TUNE[space], "tuning")
    forced = FORCED[space] | dict(over.values()) | forced
    defaults = with_defaults(given, threads, DEFAULTS[space])
    return command_line.override_argv(defaults, [f"--{name}={value}" for name, value in forced.items()])


def make_parameter(
    text: str, space: str, flags: Sequence[str], config: Config, environ: Mapping[str, str], ranks: int
) -> Parameter:
    """The parameter of --range `text`. `flags`: the trainer's, of which `config` are the settings. Raises UserError."""
    name, _, values = text.partition("=")
    values = values or RANGES[space].get(name, "")
    trainers = (f"--{name}=" if name in FLAGS else "", "", "")
    word, default, _ = KNOBS.get(name, ("", "", "")) if space == HOROVOD else trainers
    if not word or not values:
        others = "" if space == HOROVOD else ", or with values: other flags of the trainer"
        problem = "it needs values" if word else "unknown setting"
        raise UserError(f"--range {text}: {problem}. Choose from {', '.join(RANGES[space])}{others}.")
    check_own([word], SET_BY_TUNE[space], "tuning")
    now = _value_now(word, default, config, environ, ranks)
    bounds = re.fullmatch(r"([^:,]+):([^:,]+?)(:log)?", values)
    choices = [number(value) for value in (bounds.group(1, 2) if bounds else values.split(","))]
    distribution = _range(text, choices[0], choices[1], bool(bounds[3])) if bounds else None
    for value in choices:
        if word.startswith("--"):
            tried = command_line.parse(command_line.override_argv(flags, [word + as_text(value)]))
            tried.train.refuse_auto("--range")
        elif isinstance(value, str):
            raise UserError(f"--range {text}: {value} must be a number.")
    if space == HOROVOD:
        choices = list(dict.fromkeys((now, number(default), *choices)))
    return Parameter(name, word, now, distribution or CategoricalDistribution(choices))


def _range(text: str, low: Value, high: Value, log: bool) -> BaseDistribution:
    if isinstance(low, str) or isinstance(high, str) or low >= high or (log and low <= 0):
        raise UserError(f"--range {text}: LOW:HIGH must be numbers, the first one smaller (and above 0 for :log).")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(low, high, log=log)


def _value_now(word: str, default: str, config: Config, environ: Mapping[str, str], ranks: int) -> Value:
    """The value without tuning: the user's or the default. Raises UserError if a variable is not a number."""
    if word == "--global_batch=":
        return config.train.windows_per_step(ranks)
    if word.startswith("--"):
        return number(as_text(config.as_flat()[word[2:-1]]))
    value = number(environ.get(word[:-1], default))
    if isinstance(value, str):
        raise UserError(f"{word}{value} in the environment: must be a number.")
    return value


def as_text(value: Value | None) -> str:
    """A value as on a command line."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def number(text: str) -> Value:
    """A text as a finite number, if it is one."""
    try:
        value = float(text)
    except ValueError:
        return text
    return text if not math.isfinite(value) else int(text) if re.fullmatch("-?[0-9]+", text) else value


def make_setting(parameters: Sequence[Parameter], values: Mapping[str, Value]) -> Setting:
    """The variables and flags whose values differ from the user's."""
    return tuple(each.word + as_text(values[each.name]) for each in parameters if values[each.name] != each.now)


def divided(setting: Setting) -> tuple[list[str], list[str]]:
    """A setting's variables, and its flags of the trainer."""
    flags = [word for word in setting if word.startswith("--")]
    return [word for word in setting if word not in flags], flags
