"""A flag of the trainer: a field of a settings dataclass whose metadata holds all of the flag's properties.

To add one, add a field to a class of `SECTIONS` (settings.py, training.py, data.py).
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, Literal, get_args

from hvd_bert.config.parser import Limits
from hvd_bert.errors import UserError

# Sections of --help and of docs/reference/flags.md, in their order there.
Group = Literal[
    "model",
    "data",
    "training",
    "evaluation",
    "question-answering",
    "checkpoints",
    "distributed",
    "profiling",
    "output",
]
GROUPS: tuple[Group, ...] = get_args(Group)
KEY = "flag"
LARGEST_FACTOR = 1e30  # a larger one overflows in fp32


@dataclass(frozen=True, kw_only=True)
class Flag(Limits):
    """Properties of a flag, among them its range; the default is always accepted.

    Attributes:
        group: Section of --help. If it is the name of a task, other tasks refuse the flag.
        help: One-line description.
        default: The field's default.
        default_text: Description of the default, if `default` alone is not clear.
        negated_help: Description of `--no_X`, for a switch that is on by default.
        aliases: Other spellings, with dashes.
        choices: Accepted values. Empty: any value of the field's type that is in the range.
        metavar: Placeholder of the value in --help.
        owner: The only strategy that accepts another value than the default. Empty: all strategies accept it.
        may_change_on_resume: Whether a resumed run accepts another value than the checkpoint's: only if the flag does
            not change what is learned, or if checkpoints record it in another form (data, model, batch).
        chooses_start: Whether it only decides where a run starts. Only rank 0 reads it; under Horovod elastic, the
            ranks of a new world may differ in it.
        replaces: Flags in a preset or file that this flag replaces if it is on the command line.
    """

    group: Group
    help: str
    default: Any
    default_text: str = ""
    negated_help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str | int, ...] = ()
    metavar: str = ""
    owner: str = ""
    may_change_on_resume: bool = False
    chooses_start: bool = False
    replaces: tuple[str, ...] = ()

    @property
    def shown_default(self) -> str:
        """The default as --help shows it."""
        return self.default_text or (f"{self.default:g}" if isinstance(self.default, float) else str(self.default))

    def spellings(self, name: str) -> set[str]:
        """The flag's names on a command line, without dashes."""
        negated = {f"no_{name}"} if self.default is True else set()
        return {name, *(alias.lstrip("-").replace("-", "_") for alias in self.aliases)} | negated


def flag(group: Group, default: Any, description: str, **properties: Any) -> Any:
    """A dataclass field that is a flag; `properties`: those of `Flag`."""
    return field(default=default, metadata={KEY: Flag(group=group, help=description, default=default, **properties)})


def flag_properties(a_field: Field[Any]) -> Flag:
    """The properties of a field that `flag` made."""
    properties = a_field.metadata[KEY]
    assert isinstance(properties, Flag)
    return properties


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless the condition is true."""
    if not condition:
        raise UserError(message)
