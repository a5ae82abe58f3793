"""The command line and YAML files, read into the settings of `hvd_bert.config.settings`.

A flag that Hugging Face's run_qa example has keeps its name and meaning, so a command that worked there works here.
`--config` takes a preset of this package (`--config sample`) or a YAML file of the same names; flags on the command
line win over the file. Whatever is not a known name is an error.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers.hf_argparser import HfArgumentParser

from hvd_bert.config.settings import FLAGS, PACKAGE, SECTIONS, STRATEGIES, Config
from hvd_bert.errors import EXIT_OK, UserError
from hvd_bert.parsing import Parser

PRESETS = PACKAGE / "config" / "presets"

HELP = {"-h", "--help"}
# run_qa's flags that have no counterpart here.
ELSEWHERE = {
    "report_to": ": metrics.jsonl and TensorBoard are always written.",
    "evaluation_strategy": ": its name is --eval_strategy.",
    "do_predict": ": use `python -m hvd_bert.predict`.",
    "test_file": ": name it as --validation_file.",
    "save_strategy": ": give --save_steps N, or --save_steps 0 for none.",
    "greater_is_better": ": it follows from --metric_for_best_model.",
    "optim": ": it is AdamW.",
}

# A source of data or of a model named on the command line takes the place of the one a preset names; so do two flags
# for one thing.
REPLACES = {
    "dataset_name": ("train_file", "validation_file"),
    "train_file": ("dataset_name", "validation_file"),
    "validation_file": ("dataset_name",),
    "model_name_or_path": ("config_name", "tokenizer_name"),
    "padding": ("pad_to_max_length",),
    "pad_to_max_length": ("padding",),
}


class _Parser(Parser, HfArgumentParser):
    pass


def _parser() -> _Parser:
    parser = _Parser(SECTIONS, prog="python -m hvd_bert.train", allow_abbrev=False)
    parser.description = "Fine-tune BERT on SQuAD over many ranks, with Horovod or another strategy."
    presets = ", ".join(sorted(path.stem for path in PRESETS.glob("*.yaml")))
    parser.add_argument(
        "--config", metavar="NAME|FILE.yaml", help=f"A preset ({presets}) or a YAML file of these flags."
    )
    return parser


def parse(argv: list[str] | None = None, show_help: bool = True) -> Config:
    """Command line (default: this process's) -> Config. `show_help`: whether this process prints what --help asks for.

    Raises UserError for unknown flags or keys, values of the wrong type or out of range.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    if HELP & set(argv):
        if show_help:
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
        replaced = {name for flag in given for name in REPLACES.get(flag, ())} - given
        # With "=", or argparse would take a value such as -1e-05 for a flag.
        flags = [f"--{name}={value}" for name, value in from_file.items() if name not in replaced] + flags
    *parts, _, unknown = parser.parse_args_into_dataclasses(
        flags, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        name = unknown[0].lstrip("-").split("=")[0].replace("-", "_")
        raise UserError(f"Unknown argument {unknown[0]}{ELSEWHERE.get(name) or _hint(name, '--')}")
    return Config(*parts)


def before_joining(argv: list[str], parse: Callable[[list[str]], Config] = parse) -> dict[str, Any]:
    """What a process must know of its command line to join its world: `run_as_rank`'s arguments.

    Where something is wrong with it, the flag --strategy alone counts: what is wrong is said once the world is there.
    """
    try:
        if not HELP & set(argv):
            config = parse(argv)
            records = config.parallel.strategy == "horovod" and bool(config.profiling.steps_to_record)
            return {"strategy": config.parallel.strategy, "records_timeline": records}
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
    """The names of the flags among a command's words, as `hvd_bert.config.settings` has them."""
    return {word.lstrip("-").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}


def load_yaml(name: str) -> dict[str, Any]:
    """A preset's name or a YAML file's path -> flag names and values; `{package}` in them is this package's folder."""
    path = PRESETS / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        presets = ", ".join(sorted(p.stem for p in PRESETS.glob("*.yaml")))
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
