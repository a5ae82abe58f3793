"""A run's settings as others may see them: names on the hub, and names of files without their folders."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_bert.config.data import DEFAULT_MODEL, QUESTION_ANSWERING, TASKS
from hvd_bert.config.settings import FLAGS

# Where this machine keeps files, and what only matters there.
_PRIVATE_GROUPS = ("output", "profiling")
_PRIVATE = ("cache_dir", "resume_from_checkpoint", "num_threads")
# Never paths, also with a slash, as in refs/pr/1. Of every other flag, what looks like a path loses its folders.
NO_PATHS = ("model_revision", "dataset_config_name", "question_column", "context_column", "answer_column")


def from_hub(settings: Mapping[str, Any]) -> dict[str, str]:
    """The flags that name something on the hub, with their values. To be called in the run's working directory."""
    settings = _without_unused_model(settings)
    names = ("model_name_or_path", "config_name", "tokenizer_name", "dataset_name")
    return {name: settings[name] for name in names if settings[name] and not Path(settings[name]).exists()}


def public_settings(settings: Mapping[str, Any], hub: Mapping[str, str]) -> dict[str, Any]:
    """`settings` without those of this machine, and with names in place of paths. `hub`: what `from_hub` returned."""
    return {
        name: value if name in NO_PATHS or value == hub.get(name) else _without_folder(value)
        for name, value in _without_unused_model(settings).items()
        if name in FLAGS and FLAGS[name].group not in _PRIVATE_GROUPS and name not in _PRIVATE
    }


def _without_unused_model(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the default model, if the task is not one of this package's: its own model need not come from there."""
    unused = settings.get("task", QUESTION_ANSWERING) not in TASKS and settings["model_name_or_path"] == DEFAULT_MODEL
    return {**settings, "model_name_or_path": None} if unused else settings


def _without_folder(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_folder(part) for part in value]
    return re.sub(r"^([^/=]+=)?.*/", r"\1", value.rstrip("/")) if isinstance(value, str) else value  # also NAME=FILE


def command(settings: Mapping[str, Any]) -> str:
    """The training command with these settings, one flag per line."""
    words = ["python -m hvd_bert.train"]
    compares = settings["load_best_model_at_end"] or settings["early_stopping_patience"]
    unused = () if compares else ("metric_for_best_model",)  # the task sets it
    for name, value in settings.items():
        if value is None or value == FLAGS[name].default or name in unused:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words.append(f"--{name} {shlex.join(map(str, value if isinstance(value, list) else [value]))}")
    return " \\\n  ".join(words)


@dataclass(frozen=True)
class Data:
    """A training or validation set. `config` and `split`: of a data set on the hub; a task of one's own chooses."""

    name: str
    config: str | None = None
    split: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], split: str) -> Data:
        """The "train" or "validation" data of a run."""
        task = settings["task"]
        if settings["dataset_name"]:
            known = split if task in TASKS else None
            return cls(settings["dataset_name"], settings["dataset_config_name"], known)
        file = settings[f"{split}_file"]
        return cls(", ".join([file] if isinstance(file, str) else file or [task]))
