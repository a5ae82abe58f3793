"""Horovod's settings for sending gradients, and the search for faster ones, by pairs of runs: with and without one.

A drift of the machine's speed affects both runs of a pair. The result of a pair is their ratio of windows/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvd_bert.config.settings import Config
from hvd_bert.distributed.interfaces import SETTING
from hvd_bert.errors import UserError
from hvd_bert.storage.reading import MIB
from hvd_bert.tools.runs.run import Run

NOISE, SEARCH, FINAL = "noise", "search", "final"  # the purpose of a pair
NOISE_PAIRS, SEARCH_PAIRS = 2, 3
MIN_NOISE = 0.01
FASTER, SLOWER, NOT_FASTER, FAILED, NO_TIME = "faster", "clearly slower", "not faster", "failed", "no time left"


@dataclass(frozen=True)
class Pair:
    """`ratio`: windows/s of the candidate over the baseline's; None if the candidate failed, for `reason`."""

    ratio: float | None
    reason: str = ""


@dataclass
class Trial:
    """A candidate, its baseline, the ratios of its pairs, and the verdict on it."""

    setting: Setting
    baseline: Setting
    ratios: list[float] = field(default_factory=list)
    verdict: str = ""
    reason: str = ""

    @property
    def gain(self) -> float:
        """The median of the ratios, minus 1."""
        return statistics.median(self.ratios) - 1


@dataclass
class Search:
    """Tests one knob after the other, starting from the best setting so far.

    `measure`: as `Runs.measure`. `max_pairs`: of the final comparison. `on_verdict`: called with each point after its
    verdict.
    """

    measure: Callable[..., Pair | None]
    max_pairs: int
    on_verdict: Callable[[Trial], None]
    noise: float = MIN_NOISE

    def measure_noise(self) -> float:
        """The deviation from 1 of pairs of the defaults with themselves. A smaller difference counts as none."""
        pairs = [self.measure(NOISE, (), (), repeat + 1) for repeat in range(min(NOISE_PAIRS, self.max_pairs))]
        apart = [max(pair.ratio, 1 / pair.ratio) - 1 for pair in pairs if pair and pair.ratio]
        self.noise = max(MIN_NOISE, *apart)
        return self.noise

    def run(self, knobs: Sequence[Sequence[str]]) -> Setting:
        """Returns the best setting found; (): the defaults. `knobs`: the candidates of each knob."""
        best: Setting = ()
        for candidates in knobs:
            points = [self._test((*best, candidate), best) for candidate in candidates]
            faster = [point for point in points if point.verdict == FASTER]
            if faster:
                best = max(faster, key=lambda point: point.gain).setting
        return best

    def _test(self, setting: Setting, baseline: Setting) -> Trial:
        point = Trial(setting, baseline)
        while not point.verdict:
            pair = self.measure(SEARCH, setting, baseline, len(point.ratios) + 1, then=self.max_pairs)
            if pair is None:
                point.verdict = NO_TIME
            elif pair.ratio is None:
                point.verdict, point.reason = FAILED, pair.reason
            else:
                point.ratios.append(pair.ratio)
                point.verdict = self._verdict(point.ratios)
        self.on_verdict(point)
        return point

    def _verdict(self, ratios: Sequence[float]) -> str:
        """The verdict on a point's pairs; "" if another pair is needed."""
        if len(ratios) == 1 and ratios[0] < 1 - self.noise:
            return SLOWER
        last = len(ratios) == min(SEARCH_PAIRS, self.max_pairs)
        if statistics.median(ratios) <= 1 and (last or len(ratios) > 1):
            return NOT_FASTER
        return (FASTER if min(ratios) > 1 else NOT_FASTER) if last else ""

    def compare(self, best: Setting) -> Trial:
        """Compare the best setting with the defaults, in new pairs: the search's own pairs overstate the winner's gain.

        The best setting is faster if it was faster in every pair and the median gain is above the noise.
        """
        point = Trial(best, ())
        for repeat in range(self.max_pairs):
            pair = self.measure(FINAL, best, (), repeat + 1)
            if pair is None or pair.ratio is None:
                point.verdict, point.reason = FAILED, pair.reason if pair else NO_TIME
                return point
            point.ratios.append(pair.ratio)
        point.verdict = FASTER if min(point.ratios) > 1 and point.gain > self.noise else NOT_FASTER
        return point


# NAME=VALUE for the environment, --FLAG=VALUE for the trainer. () stands for the defaults.
Setting = tuple[str, ...]


@dataclass(frozen=True)
class Knob:
    """`name`: for --knobs. `word`: the variable or flag, with "=". `default`: Horovod's or the trainer's."""

    name: str
    word: str
    default: str
    values: tuple[str, ...]

    @property
    def key(self) -> str:
        """The variable's or the flag's name."""
        return self.word.removeprefix("--").removesuffix("=")

    @property
    def is_flag(self) -> bool:
        """Whether it is a flag of the trainer, not a variable."""
        return self.word.startswith("--")

    def value(self, environ: Mapping[str, str], config: Config) -> str:
        """The value without tuning: the user's or the default. Raises UserError if a variable is not a number."""
        if self.is_flag:
            return str(getattr(config.parallel, self.key))
        text = environ.get(self.key, self.default)
        if _number(text) is None:
            raise UserError(f"{self.word}{text} in the environment: must be a number.")
        return text


# The defaults are Horovod 0.28.1's (horovod/common/operations.cc, global_state.h). Its response cache is not tuned: a
# BERT has fewer than its 1024 tensors.
KNOBS = (
    Knob("hierarchical", "HOROVOD_HIERARCHICAL_ALLREDUCE=", "0", ("1",)),
    Knob("cycle", "HOROVOD_CYCLE_TIME=", "1", ("0.3", "3", "10")),
    Knob("fusion", "HOROVOD_FUSION_THRESHOLD=", str(128 * MIB), (str(8 * MIB), str(32 * MIB), str(256 * MIB))),
    Knob("groups", "--num_groups=", "0", ("2", "8")),
    Knob("fp16", "--fp16_allreduce=", "False", ("True",)),
)
NAMES = tuple(knob.name for knob in KNOBS)
DEFAULT_NAMES = tuple(name for name in NAMES if name != "fp16")  # fp16 rounds the gradients
# Variables that would change or slow down every run -> why. With "=", as in KNOBS.
REFUSED = {
    "HOROVOD_AUTOTUNE=": "it changes the same settings while a run is measured (docs/guides/tuning.md)",
    "HOROVOD_TIMELINE=": "every run would write a timeline, which slows it down",
}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def chosen(names: Sequence[str]) -> list[Knob]:
    """The knobs of those names, in the order of the search. Raises UserError."""
    for name in names:
        if name not in NAMES:
            raise UserError(f"--knobs {name}: unknown knob. Choose from: {', '.join(NAMES)}.")
    return [knob for knob in KNOBS if knob.name in names]


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise UserError for settings that would apply to every run, with any candidate."""
    for word, why in REFUSED.items():
        if environ.get(word.removesuffix("="), "0") != "0":
            raise UserError(f"{word}{environ[word.removesuffix('=')]} is set in the environment: {why}. Unset it.")


def environment(setting: Setting, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with a setting's variables."""
    words = (word.partition("=") for word in setting if not word.startswith("--"))
    return {**environ, **{name: value for name, _, value in words}}


def flags(setting: Setting) -> list[str]:
    """A setting's flags of the trainer."""
    return [word for word in setting if word.startswith("--")]


def exported(environ: Mapping[str, str]) -> list[str]:
    """The variables of KNOBS, and the network interface, that are set, to pass to ranks on other hosts."""
    return [name for name in (*(knob.key for knob in KNOBS if not knob.is_flag), SETTING) if name in environ]


def candidates(knob: Knob, now: str, run: Run) -> list[str]:
    """The candidates, given the value `now` and a run with the defaults. The default is one if `now` is not.

    Horovod ignores `hierarchical` on one host and without NCCL (operations.cc).
    """
    if knob.name == "hierarchical" and (run.on_cpu or not 1 < run.nodes < run.ranks):
        return []
    values = dict.fromkeys((knob.default, *knob.values))
    return [knob.word + value for value in values if value != now and (knob.is_flag or _number(value) != _number(now))]
