"""The trainer's flags. Each is a field of a settings dataclass; the field's metadata holds the flag's properties.

To add a flag, add a field to one of the classes in `SECTIONS` (settings.py, training.py, data.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any, cast

from hvd_bert.config.parser import Limits
from hvd_bert.errors import UserError

# The groups of flags, in the order of --help and docs/reference/flags.md.
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
    """Properties of a flag, including the range of its values. The default is accepted even if it is out of range.

    Attributes:
        group: Section of --help. If a group has the name of a task, other tasks refuse its flags.
        help: One-line description.
        default: The field's default.
        default_text: Description of the default for --help, if the value alone would be unclear.
        negated_help: Description of `--no_X`, for a switch that is on by default.
        aliases: Other spellings of the flag, with dashes.
        choices: Accepted values. Empty: any value of the field's type within the range.
        metavar: Placeholder of the value in --help.
        parse: Parser of the value's text, such as `name_or_path` for paths. None: the one of the field's type.
        owner: The only strategy that accepts a value other than the default. Empty: all strategies do.
        may_change_on_resume: Whether a resumed run accepts a value other than the checkpoint's. True only if the flag
            does not change the training's result, or if checkpoints record it in another form (data, model, batch).
        chooses_start: Whether the flag only decides where a run starts. Only rank 0 reads such a flag, since under
            Horovod elastic the ranks of a new world may have different values.
        replaces: Flags whose values from a preset, a YAML file or a model's training are ignored if this flag is given.
    """

    group: str
    help: str
    default: Any
    default_text: str = ""
    negated_help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str | int, ...] = ()
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    owner: str = ""
    may_change_on_resume: bool = False
    chooses_start: bool = False
    replaces: tuple[str, ...] = ()

    @property
    def shown_default(self) -> str:
        """The text that --help shows as the default."""
        return self.default_text or (f"{self.default:g}" if isinstance(self.default, float) else str(self.default))

    def spellings(self, name: str) -> set[str]:
        """Return the flag's spellings on a command line, without dashes in front and with underscores."""
        negated = {f"no_{name}"} if self.default is True else set()
        return {name, *(alias.lstrip("-").replace("-", "_") for alias in self.aliases)} | negated


def flag(group: str, default: Any, description: str, **properties: Any) -> Any:
    """Make a dataclass field that is a flag. `properties`: further attributes of `Flag`."""
    return field(default=default, metadata={KEY: Flag(group=group, help=description, default=default, **properties)})


def flag_properties(a_field: Field[Any]) -> Flag:
    """Return the flag's properties from a field that `flag` made."""
    return cast(Flag, a_field.metadata[KEY])


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless `condition` is true."""
    if not condition:
        raise UserError(message)
