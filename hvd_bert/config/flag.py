"""A flag of the trainer: a field of a settings dataclass whose metadata holds all of the flag's properties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args

from hvd_bert.errors import UserError

# Sections of --help and of docs/reference/flags.md, in their order there.
Group = Literal["model", "data", "training", "evaluation", "checkpoints", "distributed", "profiling", "output"]
GROUPS: tuple[Group, ...] = get_args(Group)
KEY = "flag"


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Properties of a flag.

    Attributes:
        group: Section of --help.
        help: One-line description.
        default: The field's default.
        default_text: What a run uses if the flag is not given, where `default` does not say so.
        negated_help: Description of `--no_X`, for a switch that is on by default.
        aliases: Other spellings, with dashes.
        choices: Accepted values. Empty: any value of the field's type.
        metavar: Placeholder of the value in --help.
        owner: The only strategy that accepts another value than the default. Empty: all strategies accept it.
        may_change_on_resume: Whether a resumed run accepts another value than the checkpoint's: only if the flag does
            not change what is learned, or if checkpoints record it in another form (data, model, batch).
        chooses_start: Whether it decides only where a run starts: rank 0 alone reads it, and under Horovod elastic the
            ranks of a new world may differ in it.
        replaces: Flags that a preset or file may set and that this one, on the command line, replaces.
        source: What the flag names a source of, if anything.
        sweep_hint: If not empty, a sweep sets the flag for each run. What the user should do instead.
        tune_hint: The same for tuning, where it differs from `sweep_hint`.
    """

    group: Group
    help: str
    default: Any
    default_text: str = ""
    negated_help: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    metavar: str = ""
    owner: str = ""
    may_change_on_resume: bool = False
    chooses_start: bool = False
    replaces: tuple[str, ...] = ()
    source: Literal["", "training data", "model"] = ""
    sweep_hint: str = ""
    tune_hint: str = ""

    @property
    def shown_default(self) -> str:
        """The default as --help shows it."""
        return self.default_text or (f"{self.default:g}" if isinstance(self.default, float) else str(self.default))

    def spellings(self, name: str) -> set[str]:
        """The names, without dashes, by which a command line gives the flag."""
        negated = {f"no_{name}"} if self.default is True else set()
        return {name, *(alias.lstrip("-").replace("-", "_") for alias in self.aliases)} | negated


def flag(group: Group, default: Any, description: str, **properties: Any) -> Any:
    """A dataclass field that is a flag; `properties`: those of `Flag`. HfArgumentParser reads the metadata, too."""
    settings = Flag(group=group, help=description, default=default, **properties)
    argparse_words = {"choices": list(settings.choices), "metavar": settings.metavar, "aliases": list(settings.aliases)}
    given = {key: value for key, value in argparse_words.items() if value}
    return field(default=default, metadata={"help": description, KEY: settings, **given})


def properties_of(a_field: Field[Any]) -> Flag:
    """The properties of a field that `flag` made."""
    properties = a_field.metadata[KEY]
    assert isinstance(properties, Flag)
    return properties


def all_flags(sections: Iterable[Any]) -> dict[str, Flag]:
    """The flags of several dataclasses, by name."""
    return {f.name: properties_of(f) for section in sections for f in fields(section)}


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) unless the condition is true."""
    if not condition:
        raise UserError(message)
