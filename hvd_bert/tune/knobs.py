"""What can be set about how Horovod sends gradients, which values are tried, and where one cannot matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvd_bert.config.settings import Config
from hvd_bert.errors import UserError
from hvd_bert.runs.run import Run

# NAME=VALUE for the environment, --FLAG=VALUE for the trainer; () is the defaults.
Setting = tuple[str, ...]
MIB = 2**20


@dataclass(frozen=True)
class Knob:
    """`name`: as --knobs has it. `word`: the variable or the flag, with "=". `default`: what holds without it."""

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
        """Whether it is the trainer's, and no variable."""
        return self.word.startswith("--")

    def value(self, environ: Mapping[str, str], config: Config) -> str:
        """What holds without tuning: the user's, or the default. Raises UserError for a variable that is no number."""
        if self.is_flag:
            return str(getattr(config.parallel, self.key))
        said = environ.get(self.key, self.default)
        if _number(said) is None:
            raise UserError(f"{self.word}{said} in the environment: must be a number.")
        return said


# The defaults are Horovod 0.28.1's (horovod/common/operations.cc, global_state.h). A cache larger than 1024 tensors
# would matter for no BERT.
KNOBS = (
    Knob("hierarchical", "HOROVOD_HIERARCHICAL_ALLREDUCE=", "0", ("1",)),
    Knob("cycle", "HOROVOD_CYCLE_TIME=", "1", ("0.3", "3", "10")),
    Knob("fusion", "HOROVOD_FUSION_THRESHOLD=", str(128 * MIB), (str(8 * MIB), str(32 * MIB), str(256 * MIB))),
    Knob("groups", "--num_groups=", "0", ("2", "8")),
    Knob("cache", "HOROVOD_CACHE_CAPACITY=", "1024", ("0",)),
    Knob("fp16", "--fp16_allreduce=", "False", ("True",)),
)
NAMES = tuple(knob.name for knob in KNOBS)
UNASKED = tuple(name for name in NAMES if name != "fp16")  # which changes the numbers that are sent
# Variables that would change or slow every run -> why. With "=", as KNOBS.
IN_THE_WAY = {
    "HOROVOD_AUTOTUNE=": "it changes the same settings while a run is measured (docs/guides/tuning.md)",
    "HOROVOD_TIMELINE=": "every run would write one, and be slower for it",
}
# What horovodrun, by flags of its own, sets in place of the environment.
HOROVODRUN = (
    *("--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity", "--hierarchical-allreduce"),
    *("--no-hierarchical-allreduce", "--autotune", "--timeline-filename", "--config-file"),
)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def chosen(names: Sequence[str]) -> list[Knob]:
    """The knobs of those names, in the order in which they are tried. Raises UserError."""
    for name in names:
        if name not in NAMES:
            raise UserError(f"--knobs {name}: no such knob. There are: {', '.join(NAMES)}.")
    return [knob for knob in KNOBS if knob.name in names]


def check_surroundings(environ: Mapping[str, str], launcher_words: Sequence[str]) -> None:
    """Raise UserError for what would be set in every run besides what is tried."""
    for word, why in IN_THE_WAY.items():
        if environ.get(word.removesuffix("="), "0") != "0":
            raise UserError(f"{word}{environ[word.removesuffix('=')]} in the environment: unset it; {why}.")
    for word in launcher_words:
        ours = [knob.key for knob in KNOBS if not knob.is_flag and knob.key in word]
        if ours or word.split("=")[0] in HOROVODRUN:
            raise UserError(
                f"--launcher_flag={word}: would hold in every run. Set HOROVOD_... in the environment of this command"
                " instead, and the gain is over that."
            )


def environment(setting: Setting, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with a setting's variables."""
    words = (word.partition("=") for word in setting if not word.startswith("--"))
    return {**environ, **{name: value for name, _, value in words}}


def flags(setting: Setting) -> list[str]:
    """A setting's flags of the trainer."""
    return [word for word in setting if word.startswith("--")]


def exported(environ: Mapping[str, str]) -> list[str]:
    """The variables of KNOBS that are set, and must reach the ranks on other hosts."""
    return [knob.key for knob in KNOBS if not knob.is_flag and knob.key in environ]


@dataclass(frozen=True)
class Context:
    """What decides whether a knob matters: the settings, and a run with the defaults."""

    config: Config
    run: Run

    def candidates(self, knob: Knob, now: str) -> tuple[list[str], dict[str, str]]:
        """The words to try where `now` holds, the default's too if the user has another; and those left out -> why."""
        candidates, left_out = [], {}
        for value in dict.fromkeys((knob.default, *knob.values)):
            if value == now or (not knob.is_flag and _number(value) == _number(now)):
                continue
            reason = self._idle(knob, value, now)
            if reason:
                left_out[knob.word + value] = reason
            else:
                candidates.append(knob.word + value)
        return candidates, left_out

    def _idle(self, knob: Knob, value: str, now: str) -> str:
        """Why this value can make no difference, or cannot be set; "" where it can."""
        run, config = self.run, self.config
        if knob.name == "hierarchical":
            # operations.cc: ignored on one host, and where the reduction is not NCCL's.
            if run.nodes == 1:
                return "all ranks are on one host"
            if run.on_cpu:
                return "the ranks are on CPUs, and Horovod has it for NCCL only"
            if run.nodes == run.ranks:
                return "each rank is on a host of its own"
        if knob.name == "fusion" and run.parameters:
            sent = run.parameters * (2 if config.parallel.fp16_allreduce else 4)
            if min(float(value), float(now)) >= sent:
                return f"all gradients together are {sent / 1e6:.0f} MB"
        if knob.name == "groups":
            if config.train.deterministic:
                return "--deterministic sends all gradients as one group"
            if config.parallel.gradient_predivide_factor != 1:
                return "Horovod groups no gradients with --gradient_predivide_factor"
        return ""
