"""The command line and YAML files, read into the settings of `hvd_bert.config.settings`.

Flags of Hugging Face's run_qa example keep their names and meaning, so a run_qa command works here. `--config` takes a
preset of this package (`--config sample`) or a YAML file of flags; the command line overrides the file. Unknown names
are errors.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hvd_bert.config.parser import HELP
from hvd_bert.config.settings import FLAGS, PACKAGE, STRATEGIES, Config
from hvd_bert.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    from transformers.hf_argparser import HfArgumentParser

PRESETS = PACKAGE / "config" / "presets"

# run_qa's flags that have no field here -> what to do instead.
RUN_QA_FLAGS_NOT_HERE = {
    "report_to": ": metrics.jsonl and TensorBoard are always written.",
    "evaluation_strategy": ": use --eval_strategy.",
    "do_predict": ": use `python -m hvd_bert.predict`.",
    "test_file": ": use --validation_file.",
    "save_strategy": ": use --save_steps N, or --save_steps 0 for none.",
    "greater_is_better": ": --metric_for_best_model determines it.",
    "optim": ": the optimizer is always AdamW.",
}


def make_parser() -> HfArgumentParser:
    """The parser of the trainer's flags."""
    from hvd_bert.config.flags_parser import FlagsParser  # brings transformers, which not every command needs

    return FlagsParser(_presets())


def _presets() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def parse(argv: list[str] | None = None) -> Config:
    """Command line (default: this process's) -> Config.

    Raises UserError for unknown flags or keys, values of the wrong type or out of range.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    if HELP & set(argv):
        parser.print_help()
        sys.exit(EXIT_OK)
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    chooser.add_argument("--config")
    try:
        chosen, flags = chooser.parse_known_args(argv)
    except argparse.ArgumentError:
        raise UserError("--config needs a value: a preset's name or a YAML file.") from None
    if chosen.config is not None:
        from_file = load_yaml(chosen.config)
        given = names_of(flags)
        replaced = {name for flag in given & FLAGS.keys() for name in FLAGS[flag].replaces} - given
        # With "=", or argparse would take a value such as -1e-05 for a flag.
        flags = [f"--{name}={value}" for name, value in from_file.items() if name not in replaced] + flags
    *parts, _, unknown = parser.parse_args_into_dataclasses(
        flags, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0].replace("-", "_")
        raise UserError(f"Unknown argument {unknown[0]}{RUN_QA_FLAGS_NOT_HERE.get(name) or _hint(name, '--')}")
    return Config(*parts)


def before_joining(argv: list[str], parse: Callable[[list[str]], Config] = parse) -> dict[str, Any]:
    """The settings that a process needs to join its world, as arguments of `run_as_rank`.

    If the command line is wrong, only --strategy is read; the error is reported after the ranks have joined.
    """
    try:
        if not HELP & set(argv):
            config = parse(argv)
            records = config.parallel.strategy == "horovod" and bool(config.profiling.steps_to_record)
            return {
                "strategy": config.parallel.strategy,
                "records_timeline": records,
                "log_format": config.train.log_format,
            }
    except UserError:
        pass
    return {"strategy": _strategy_flag(argv)}


def _strategy_flag(argv: list[str]) -> str:
    chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    chooser.add_argument("--strategy", choices=STRATEGIES, default=STRATEGIES[0])
    try:
        return str(chooser.parse_known_args(argv)[0].strategy)
    except argparse.ArgumentError:
        return STRATEGIES[0]


def names_of(words: Sequence[str]) -> set[str]:
    """The names of the flags on a command line, as in `hvd_bert.config.settings`."""
    return {word.lstrip("-").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def load_yaml(name: str) -> dict[str, Any]:
    """Flag names and values of a preset or a YAML file; `{package}` in a value stands for this package's folder."""
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        presets = ", ".join(_presets())
        raise UserError(f"--config {name}: no such file, and no preset of that name. Presets: {presets}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {name}: cannot be read as YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--config {name}: must be lines of `flag: value`.")
    for key, value in content.items():
        if key not in FLAGS:
            raise UserError(f"--config {name}: unknown key '{key}'{_hint(str(key), '')}")
        if isinstance(value, (dict, list)):
            raise UserError(f"--config {name}: '{key}' must be a single value, not {type(value).__name__}.")
    values = {key: value for key, value in content.items() if value is not None}
    if values.get("eval_strategy") is False:  # how YAML reads an unquoted no
        values["eval_strategy"] = "no"
    return {k: v.replace("{package}", str(PACKAGE)) if isinstance(v, str) else v for k, v in values.items()}


def _hint(name: str, prefix: str) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), FLAGS, n=1)
    return f": did you mean {prefix}{close[0]}?" if close else "."
