"""Parsing of the values of --train_file (FILE or FILE:WEIGHT) and --validation_file (FILE or NAME=FILE).

FILE may be a pattern such as shards/*.jsonl, since no shell expands it in YAML, in Python or after NAME=. After
NAME=, it must match a single file.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_bert.config.flag import require
from hvd_bert.config.parser import name_or_path

_RESERVED = {"eval", "macro", "HasAns", "NoAns", "best"}  # words in names of other metrics, such as macro_f1


@dataclass(frozen=True)
class DataFile:
    """A data file.

    `name`: the prefix of a validation file's metrics; "" for a single file without a name. `weight`: average number of
    times that an epoch contains each window of a training file.
    """

    path: str
    name: str = ""
    weight: float = 1.0


def data_path(text: str) -> str:
    """Parse FILE, FILE:WEIGHT or NAME=FILE, with FILE as in `name_or_path`."""
    name, path = _split(text)
    return f"{name}={name_or_path(path)}" if name else name_or_path(text)


def data_files(flag: str, given: str | Sequence[str] | None) -> list[DataFile]:
    """Parse the value of `flag` into its files. A pattern stands for its files, in the order of their names.

    An entry that is an existing path is not split at "=" or ":", and is no pattern. Raises UserError for an invalid
    name or weight, or if two files are the same or have the same name.
    """
    texts = [given] if isinstance(given, str) else given or []
    files = [file for text in texts for file in _parsed(flag, text)]
    if flag == "validation_file" and len(files) > 1:  # the default NAME is the file's name without extensions
        files = [replace(file, name=file.name or Path(file.path).name.split(".")[0] or ".") for file in files]
    paths: dict[str, str] = {}
    names: dict[str, str] = {}
    for file in files:
        real = os.path.realpath(file.path)
        require(real not in paths, f"--{flag}: {paths.get(real)} and {file.path} are the same file. Give it once.")
        paths[real] = file.path
        if file.name:
            allowed = re.fullmatch(r"[A-Za-z0-9][\w.-]*", file.name, re.A) and not _RESERVED & {*file.name.split("_")}
            require(bool(allowed), f"--{flag} {file.path}: {file.name!r} cannot name metrics. Give another NAME=FILE.")
            other = names.get(file.name)
            require(
                not other,
                f"--{flag}: {other} and {file.path} are both named {file.name}. Give one another NAME=FILE, or leave"
                " out NAME= for a pattern.",
            )
            names[file.name] = file.path
    return files


def _parsed(flag: str, text: str) -> list[DataFile]:
    if flag not in ("train_file", "validation_file"):
        return [DataFile(text)]
    name, path = _split(text)
    file = _weighted(text) if flag == "train_file" else DataFile(path, name)
    # Without a match, reading the file reports the pattern. An evaluation does not need the training's files.
    paths = [] if os.path.exists(file.path) else sorted(glob.glob(file.path, recursive=True))
    return [replace(file, path=path) for path in paths or [file.path]]


def _split(text: str) -> tuple[str, str]:
    """Split NAME=FILE into NAME and FILE. NAME is "" for a text that is only FILE."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and path and "/" not in name and not os.path.exists(text) else ("", text)


def _weighted(text: str) -> DataFile:
    """Parse FILE or FILE:WEIGHT. The text after the last colon is the weight if it is a number or FILE exists."""
    path, _, weight = text.rpartition(":")
    is_number = re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", weight, re.ASCII)
    if os.path.exists(text) or not path or not (is_number or os.path.exists(path)):
        return DataFile(text)
    valid = is_number and 0 < float(weight) <= 1000
    require(bool(valid), f"--train_file {text}: the weight {weight} is not a number above 0 and at most 1000.")
    return DataFile(path, weight=float(weight))
