"""The settings of runs: what differs from the defaults, and between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_bert.config.settings import FLAGS
from hvd_bert.rendering.page import DASH, Grid
from hvd_bert.tools.runs.record import Record

OUTPUT = ("output_dir", "overwrite_output_dir")  # differ between any two runs
# Of train_results.json: the world and the machine.
FACTS = ("world_size", "global_batch", "learning_rate", "train_steps", "hosts", "device_name", "threads_per_rank")


def shown(value: Any) -> str:
    """A setting's value as text."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or DASH
    return f"{value:g}" if isinstance(value, float) else str(value)


def changed(settings: Mapping[str, Any]) -> Grid:
    """The settings that differ from their defaults."""
    rows = []
    for name, value in settings.items():
        if _is_changed(name, value):
            flag = FLAGS.get(name)
            default = (flag.default_text if flag.default is None else shown(flag.default)) if flag else "unknown flag"
            rows.append([f"--{name}", shown(value), default or DASH])
    return Grid(["setting", "value", "default"], rows, words=3)


def unchanged(settings: Mapping[str, Any]) -> Grid:
    """The settings that have their defaults."""
    rows = [[f"--{name}", shown(value)] for name, value in settings.items() if not _is_changed(name, value)]
    return Grid(["setting", "value"], rows, words=2)


def _is_changed(name: str, value: Any) -> bool:
    return name not in FLAGS or value != FLAGS[name].default


def differences(records: Sequence[Record]) -> Grid:
    """Everything that is not the same in all runs: a row per run or, if there are fewer runs, a column per run."""
    values = [_compared(record) for record in records]
    names = dict.fromkeys(name for of_run in values for name in of_run)
    differing = [name for name in names if len({of_run.get(name, DASH) for of_run in values}) > 1]
    runs = [record.name for record in records]
    if len(differing) > len(records):
        rows = [[name, *(of_run.get(name, DASH) for of_run in values)] for name in differing]
        return Grid(["what", *runs], rows, words=len(runs) + 1)
    rows = [[run, *(of_run.get(name, DASH) for name in differing)] for run, of_run in zip(runs, values, strict=True)]
    return Grid(["run", *differing], rows, words=len(differing) + 1)


def _compared(record: Record) -> dict[str, str]:
    compared = {f"--{name}": shown(value) for name, value in record.settings.items() if name not in OUTPUT}
    compared |= {name.replace("_", " "): shown(record.facts[name]) for name in FACTS if name in record.facts}
    for key in ("versions", "work"):
        kind = record.facts.get(key)
        if isinstance(kind, dict):
            compared |= {str(name): shown(value) for name, value in kind.items() if str(name) not in compared}
    return compared
