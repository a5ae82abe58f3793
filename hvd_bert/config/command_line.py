"""Parsing of the command line and of YAML files into the settings of `hvd_bert.config.settings`.

Flags of Hugging Face's run_qa example keep their names; docs/guides/migrating.md lists the differences. `--config`
takes a preset of this package (`--config sample`) or a YAML file of flags. The command line overrides the file. Unknown
flags and keys are errors. Values in a file are read as text, like those on the command line, because YAML's own types
would change them (1:30 is 90, 010 is 8, `no` is False, and 2024-02-30 is an error).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from hvd_bert.config.flag import GROUPS, require
from hvd_bert.config.other_names import hint, unknown
from hvd_bert.config.parser import HELP, HelpFormatter, Parser, checked_path, number_or_auto, shortened, switch
from hvd_bert.config.settings import FLAGS, NAMES, PACKAGE, SECTIONS, Config, from_flags
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.errors import EXIT_OK, UserError, find_user_error
from hvd_bert.storage.reading import MAX_YAML_BYTES, read_text

PRESETS = PACKAGE / "config" / "presets"
EXAMPLES = """

examples:
  python -m hvd_bert.train --config sample                 sample data, no download
  python -m hvd_bert.train --train_file train-v1.1.json --validation_file dev-v1.1.json
  horovodrun -np 2 python -m hvd_bert.train --bf16         two ranks, one per GPU"""
# The most used flags, which --help lists if no topic is given.
USED_FIRST = """
model_name_or_path task train_file validation_file max_seq_length per_device_train_batch_size
gradient_accumulation_steps learning_rate num_train_epochs max_steps warmup_ratio seed bf16 fp16 save_steps
version_2_with_negative strategy output_dir fast_dev_run report_to
"""
_TYPES = {a_field.name: a_field.type for section in SECTIONS for a_field in fields(section)}
# A field's type -> the flag's type for argparse, and the value's placeholder in --help.
_KINDS: dict[str, tuple[Callable[[str], Any], str | None]] = {
    "int": (int, "N"),
    "float": (float, "X"),
    "str": (str, None),
    "bool": (switch, None),
}
_LOOKS_LIKE_FLAG = re.compile(r"--[^ =]*(=|\Z)|-[^-\d. ][^ ]*\Z")  # argparse takes other words for values


def make_parser(names: Collection[str] = FLAGS) -> Parser:
    """Make a parser of the trainer's flags, which --help lists by group. `names`: the flags to include."""
    parser = Parser(
        prog="python -m hvd_bert.train",
        usage="%(prog)s [-h] [--config NAME|FILE.yaml] [--FLAG VALUE ...]",
        description="Fine-tune BERT on SQuAD, or train another task, with Horovod or another strategy.",
        epilog="A switch such as --bf16 also takes a value (--bf16 False). Flags may be written with hyphens"
        " (--max-seq-length). Flags on the command line override those of --config.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    presets = ", ".join(_presets())
    parser.add_argument(
        "--config", metavar="NAME|FILE.yaml", help=f"Preset ({presets}) or YAML file of flags. (default: none)"
    )
    groups = {group: parser.add_argument_group(group) for group in GROUPS}
    for name, flag in FLAGS.items():
        if name not in names:
            continue
        add_flag(groups[flag.group], name, flag.default, flag.shown_default)
        if flag.default is True:
            negated = (f"--no_{name}", f"--no-{name.replace('_', '-')}")
            groups[flag.group].add_argument(
                *negated, dest=name, nargs=0, const=False, default=True, help=flag.negated_help
            )
    return parser


def help_text(topic: str = "") -> str:
    """Return the text of `--help TOPIC`. Raises UserError for an unknown topic.

    `topic`: a group of flags, a single flag, or "all"; "": the most used flags.
    """
    topics = {"": USED_FIRST.split(), "all": [*FLAGS], **{spelling: [name] for spelling, name in NAMES.items()}}
    for name, flag in FLAGS.items():
        topics.setdefault(flag.group, []).append(name)
    topic = topic if topic in topics else topic.replace("-", "_")
    if topic not in topics:
        choices = ", ".join(["all", *GROUPS])
        raise UserError(f"--help {shortened(topic)}: no such group or flag{hint(topic)} Choose from {choices}.")
    parser = make_parser(topics[topic])
    if not topic:
        parser.description = f"{parser.description}{EXAMPLES}"
    parser.epilog = (
        f"`--help all` lists all {len(FLAGS)} flags, `--help GROUP` those of {', '.join(GROUPS)}. {parser.epilog}"
    )
    return parser.format_help()


def add_flag(parser: argparse._ActionsContainer, name: str, default: Any, shown_default: str) -> None:
    """Add one of the trainer's flags to a command's parser, with this command's default."""
    flag = FLAGS[name]
    kind, metavar = _KINDS[_TYPES[name].split(" | ")[0]] if not flag.auto else (number_or_auto, "N|auto")
    parser.add_argument(
        *dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}", *flag.aliases]),
        help=f"{flag.help} (default: {shown_default})",
        type=flag.parse or kind,
        default=default,
        choices=flag.choices or None,
        metavar=flag.metavar or (None if flag.choices else metavar),
        limits=flag,
        nargs="+" if flag.several else "?" if kind is switch else None,
        const=True,
    )


def _presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def parse(argv: list[str] | None = None, defaults: Mapping[str, Any] | None = None, prefix: str = "--") -> Config:
    """Parse a command line (default: this process's) into the settings of a run.

    `defaults`: settings that `--config` and flags override, such as the settings of a model's training. `prefix`: the
    characters before flags in messages. Raises one UserError for all unknown flags and keys, and all values of the
    wrong type or out of range; else for flags that exclude each other.
    """
    return from_flags(read_values(sys.argv[1:] if argv is None else argv, defaults, prefix))


def read_values(argv: Sequence[str], defaults: Mapping[str, Any] | None = None, prefix: str = "--") -> dict[str, Any]:
    """Parse a command line as `parse` does, but return the values of all flags without checking their combination.

    With --help, prints the help and exits.
    """
    if HELP & set(argv):
        topic = [*argv, ""][min(argv.index(word) for word in HELP & set(argv)) + 1]
        print(help_text("" if topic.startswith("-") else topic), end="")
        sys.exit(EXIT_OK)
    parser = make_parser()
    chooser = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    chooser.add_argument("--config", nargs="?", const="")
    chosen, flags = chooser.parse_known_args(argv)
    before, problems = dict(defaults or {}), list[str]()
    if chosen.config is not None:
        try:
            from_file = load_yaml(chosen.config)
        except UserError as error:
            problems.append(str(error))
        else:
            before = _not_replaced(before, from_file.keys()) | from_file
    settings = argparse.Namespace(**_not_replaced(before, given_flags(flags)))
    others, wrong = _parse_each(parser, flags, settings)
    problems += unknown("Unknown argument", [word.replace("--", prefix, 1) for word in others], prefix)
    problems += [problem.replace("--", prefix, 1) for problem in wrong]
    _raise_all(problems, parser)
    return vars(settings)


def _parse_each(parser: Parser, words: Sequence[str], settings: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Parse the words of a command line into `settings`, flag by flag. Returns unknown flags, and errors in values."""
    flags: list[list[str]] = [[]]
    for word in words:
        if _LOOKS_LIKE_FLAG.match(word):
            flags.append([])
        flags[-1].append(word)
    others, wrong = list[str](), list[str]()
    for flag in flags:
        try:
            rest = parser.parse_known_args(flag, settings)[1]
            is_flag = rest[:1] == flag[:1] and flag is not flags[0]
            others += rest[:1] if is_flag else rest  # the words after an unknown flag are its values
        except UserError as error:
            wrong.append(str(error))
    return others, wrong


def _raise_all(problems: Sequence[str], parser: Parser) -> None:
    """Raise UserError for all problems, one per line, if there are any."""
    if problems:
        lines = [problem.removesuffix(parser.advice) for problem in problems]
        raise UserError("\n".join(lines) + (parser.advice if lines != [*problems] else ""))


def _not_replaced(settings: Mapping[str, Any], given: Set[str]) -> dict[str, Any]:
    """Return `settings` without those that the flags in `given` replace (`Flag.replaces`)."""
    replaced = {name for flag in given for name in FLAGS[flag].replaces} - given
    return {name: value for name, value in settings.items() if name not in replaced}


def before_joining(argv: list[str], parse: Callable[[list[str]], Config] = parse) -> dict[str, Any]:
    """Return the arguments of `run_as_rank` that a process needs before it joins its world.

    With --help or a wrong command line, returns only the strategy: the help or the error follows after the ranks have
    joined.
    """
    try:
        if not HELP & set(argv):
            config = parse(argv)
            return {"strategy": config.parallel.strategy, "records_timeline": config.profiling.timeline is not None}
    except Exception as error:
        if find_user_error(error) is None:
            raise
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--strategy", nargs="?")
    strategy = chooser.parse_known_args(argv)[0].strategy
    return {"strategy": strategy if strategy in STRATEGIES else FLAGS["strategy"].default}


def flag_names(words: Sequence[str]) -> set[str]:
    """Return the flags on a command line without dashes in front, with hyphens replaced by underscores."""
    return {word.lstrip("-").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def given_flags(words: Sequence[str]) -> set[str]:
    """Return the field names of the trainer's flags on a command line. All spellings are recognized."""
    return {NAMES[spelling] for spelling in flag_names(words) & NAMES.keys()}


def drop_flags(words: Sequence[str], names: Iterable[str]) -> list[str]:
    """Remove the flags `names`, in all spellings, and their values from the words of a command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        spellings = FLAGS[name].spellings(name)
        forms = spellings | {spelling.replace("_", "-") for spelling in spellings}
        parser.add_argument(*(f"--{form}" for form in forms), nargs="*" if FLAGS[name].several else "?")
    return parser.parse_known_args(words)[1]


def override_argv(words: Sequence[str], later: Sequence[str]) -> list[str]:
    """Append the flags `later` to a command line, and remove earlier values of the same flags."""
    return [*drop_flags(words, given_flags(later)), *later]


def load_yaml(name: str) -> dict[str, Any]:
    """Read a preset or a YAML file. Returns its values by flag, without flags whose value is empty or null.

    `{package}` in a value is replaced by this package's folder. Raises UserError.
    """
    name = checked_path("--config", name)
    presets = _presets()
    path = PRESETS / f"{name}.yaml" if name in presets else Path(name)
    try:
        given = yaml.load(read_text(path, MAX_YAML_BYTES), Loader=yaml.BaseLoader)  # leaves all values as text
    except FileNotFoundError:
        choices = ", ".join(presets)
        raise UserError(f"--config {name}: no such file, and no preset of that name. Choose from {choices}.") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--config {name}: cannot be read as YAML: {reason}") from None
    require(isinstance(given, dict) and bool(given), f"--config {name}: must be lines of `flag: value`.")
    problems = unknown("unknown key", [f"'{flag}'" for flag in given if flag not in FLAGS], "")
    values = {flag: value for flag, value in given.items() if flag in FLAGS and value not in ("", "~", "null")}
    nested = [flag for flag, value in values.items() if not _is_single(flag, value)]
    form = {True: "a single value or a list of them", False: "a single value, not a list or a mapping"}
    problems += [f"'{flag}' must be {form[FLAGS[flag].several]}." for flag in nested]
    words = [word for flag, value in values.items() if flag not in nested for word in to_argv(flag, value)]
    parser, parsed = make_parser(), argparse.Namespace()
    others, wrong = _parse_each(parser, words, parsed)
    problems += unknown("unknown argument", others) + wrong
    _raise_all([f"--config {name}: {problem}" for problem in problems], parser)
    read = {flag: getattr(parsed, flag) for flag in values}
    return {k: v.replace("{package}", str(PACKAGE)) if isinstance(v, str) else v for k, v in read.items()}


def _is_single(flag: str, value: Any) -> bool:
    """Return whether a value from a YAML file is a text or, for a flag with several values, a list of texts."""
    texts = value if isinstance(value, list) and FLAGS[flag].several else [value]
    return all(isinstance(text, str) for text in texts)


def to_argv(flag: str, value: Any) -> list[str]:
    """Convert a flag and its value to words of a command line."""
    return [f"--{flag}", *map(str, value)] if isinstance(value, list | tuple) else [f"--{flag}={value}"]


def trained_settings(model: str) -> dict[str, Any]:
    """Read the settings with which a model was trained from its train_config.yaml; {} without such a file."""
    file = trained_file(model)
    return load_yaml(str(file)) if file else {}


def trained_file(model: str) -> Path | None:
    """Find the train_config.yaml of a model folder or a checkpoint, also in its parent folder. None for a hub name."""
    folder = Path(model)
    if os.path.isdir(model):  # Path's methods raise for a name that is too long
        folder = folder.resolve()  # the name of "." or of a link does not show that it is a checkpoint
    for candidate in (folder, folder.parent) if folder.name.startswith("checkpoint-") else (folder,):
        if os.path.isfile(candidate / "train_config.yaml"):
            return candidate / "train_config.yaml"
    return None
