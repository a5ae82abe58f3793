"""A flag of the trainer: a field of a settings dataclass whose metadata holds all of the flag's properties.

To add one, add a field to a class of `SECTIONS` (settings.py, training.py, data.py).
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field
from typing import Any, cast

from hvd_bert.config.parser import Limits
from hvd_bert.errors import UserError

# Sections of --help and of docs/reference/flags.md, in this order.
GROUPS = [
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
KEY = "flag"
LARGEST_FACTOR = 1e30  # larger factors overflow in fp32


@dataclass(frozen=True, kw_only=True)
class Flag(Limits):
    """Properties of a flag, including the range of its values; the default is always accepted.

    Attributes:
        group: Section of --help. A group with the name of a task has flags that other tasks refuse.
        help: One-line description.
        default: The field's default.
        default_text: Description of the default, if `default` alone is not clear.
        negated_help: Description of `--no_X`, for a switch that is on by default.
        aliases: Other spellings, with dashes.
        choices: Accepted values. Empty: any value of the field's type within the range.
        metavar: Placeholder of the value in --help.
        owner: The only strategy that accepts a value other than the default. Empty: all strategies do.
        may_change_on_resume: Whether a resumed run accepts a value other than the checkpoint's: only if the flag does
            not change the result of the training, or if checkpoints record it in another form (data, model, batch).
        chooses_start: Whether the flag only decides where a run starts. Only rank 0 reads such a flag; under Horovod
            elastic, the ranks of a new world may have different values.
        replaces: Flags of a preset or YAML file that are ignored if this flag is on the command line.
    """

    group: str
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


def flag(group: str, default: Any, description: str, **properties: Any) -> Any:
    """A dataclass field that is a flag; `properties`: further attributes of `Flag`."""
    return field(default=default, metadata={KEY: Flag(group=group, help=description, default=default, **properties)})


def flag_properties(a_field: Field[Any]) -> Flag:
    """The properties of a field that `flag` made."""
    return cast(Flag, a_field.metadata[KEY])


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless the condition is true."""
    if not condition:
        raise UserError(message)
