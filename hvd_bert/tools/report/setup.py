"""Show the settings of runs and their differences, and write the paragraph "Set-up" from recorded facts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hvd_bert.config.settings import FLAGS, HASHED, named, read_alike
from hvd_bert.config.strategies import STRATEGIES
from hvd_bert.storage.reading import GIB
from hvd_bert.tools.rendering import DASH, shown
from hvd_bert.tools.rendering.page import Block, Code, Details, Grid, Text
from hvd_bert.tools.runs.record import Record
from hvd_bert.tools.runs.tolerant import finite_number

TEXTS = yaml.safe_load(resources.files("hvd_bert.tools.report").joinpath("texts.yaml").read_text(encoding="utf-8"))
OUTPUT = ("output_dir", "overwrite_output_dir")  # settings that say nothing about the training
# Keys of train_results.json that describe the world and the machine.
FACTS = ("world_size", "global_batch", "learning_rate", "train_steps", "hosts", "device_name", "threads_per_rank")


def blocks(records: Sequence[Record], sweeps: Sequence[str]) -> list[Block]:
    """Make the paragraph "Set-up" and a block with the commands of the sweeps or, without sweeps, of the runs."""
    commands = sweeps or [str(record.facts["command"]) for record in records if "command" in record.facts]
    return [Text(paragraph(records)), Code("\n".join(dict.fromkeys(commands)))]


def paragraph(records: Sequence[Record]) -> str:
    """Describe hardware, software, model, data, training and Slurm job in sentences to copy into a report."""
    known = [_used(record) for record in records]
    sentences = []
    for title, forms in TEXTS["set_up"].items():
        facts = [_fact([facts.get(key) for facts in known], key, form) for key, form in forms.items()]
        words = dict.fromkeys(filter(None, facts))  # without repeated facts: a CPU is both the device and the processor
        sentences += [f"{title}: {', '.join(words)}."] if words else []
    return " ".join(sentences)


def _used(record: Record) -> dict[str, Any]:
    """Collect a run's facts and flags by the keys of texts.yaml, except versions of packages that it did not use."""
    facts = dict(record.facts) | {f"--{name}": value for name, value in record.settings.items()}
    for group in ("machine", "versions", "work", "job"):
        facts |= {f"{group}.{name}": value for name, value in record.object(group).items()}
    others = [row.package for name, row in STRATEGIES.items() if name != facts.get("strategy")]
    unused = [f"versions.{package}" for package in others if package]
    unused += [] if facts.get("machine.gpus") else ["versions.nccl", "versions.cuda"]
    unused += ["controller"] if facts.get("controller") == "none" else []  # a single rank does not need a controller
    return {key: value for key, value in facts.items() if key not in unused}


def _fact(found: Sequence[Any], key: str, form: str) -> str:
    """Format one fact; different values are joined by "and". "" if no run recorded it. `found`: the runs' values."""
    items = (item for value in found for item in (value if isinstance(value, list) else [value]))
    values = list(dict.fromkeys(_text(key, item) for item in items if item not in (None, "")))
    text = form.format(" and ".join(filter(None, [", ".join(values[:-1]), *values[-1:]])), count=len(values))
    return re.sub(r"^1 (\w+)s\b", r"1 \1", text) if values else ""


def _text(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{(finite_number(value) or 0) / GIB:.0f} GiB"
    if key == "work.the model":  # `197 tensors, 1,000,000 parameters, 0123456789ab` -> `1,000,000 parameters`
        return str(value).rpartition(", ")[0].partition(", ")[2]
    if key.startswith("versions."):
        return str(value).partition("+")[0]  # without the name of the build
    if type(value) is int:
        return f"{value:,}"
    return Path(value).name if str(value).startswith("/") else shown(value)


def settings(record: Record) -> list[Block]:
    """Make the table of settings that differ from their defaults, and a folded table of all other settings."""
    changed, others = [], []
    for name, value in record.settings.items():
        flag = FLAGS.get(name)
        if flag and value == flag.default:
            others.append([f"--{name}", shown(value)])
        else:
            default = (flag.default_text if flag.default is None else shown(flag.default)) if flag else "unknown flag"
            changed.append([f"--{name}", shown(value), default or DASH])
    rest = Details(f"{len(others)} settings at their defaults", [Grid(["setting", "value"], others, words=2)])
    return [Grid(["setting", "value", "default"], changed, words=3), rest] if record.settings else []


def differences(records: Sequence[Record]) -> Grid:
    """Make the table of settings, facts and versions that differ between runs. Runs with equal values share an entry.

    Omits --seed if some runs differ only in the seed, unless nothing else differs at all. Runs are rows, or columns if
    there are two runs, or more settings than runs.
    """
    values = [_compared(record) for record in records]
    _replace_hashes(values, records)
    names = dict.fromkeys(name for compared in values for name in compared)
    differing = [name for name in names if len({compared.get(name, DASH) for compared in values}) > 1]
    differing = [name for name in differing if name not in _repeated(differing)]
    for chosen in ([name for name in differing if name != "--seed"], differing):
        names_by_values: dict[tuple[str, ...], list[str]] = {}
        for record, compared in zip(records, values, strict=True):
            names_by_values.setdefault(tuple(compared.get(name, DASH) for name in chosen), []).append(record.name)
        if 1 < len(names_by_values) < len(records):  # some runs differ only in the seed: they are repeats
            break
    runs = [run + (f" and {len(others)} more" if others else "") for run, *others in names_by_values.values()]
    if chosen and (len(chosen) > len(runs) or len(records) == 2):
        rows = [[name, *cells] for name, cells in zip(chosen, zip(*names_by_values, strict=True), strict=True)]
        return Grid(["setting", *runs], rows, words=len(runs) + 1)
    rows = [[run, *cells] for run, cells in zip(runs, names_by_values, strict=True)]
    return Grid(["run", *chosen], rows, words=len(chosen) + 1)


def _repeated(names: Sequence[str]) -> set[str]:
    """Return the differing properties that repeat another one, such as the scaled learning rate and its flag."""
    repeated = {name for name in names if f"--{name.replace(' ', '_')}" in names}
    repeated |= {"--train_file", "--dataset_name"} if "the training data" in names else set()
    return repeated | ({"the tokenizer"} if {f"--{flag}" for flag in HASHED["the tokenizer"][1]} & {*names} else set())


def _compared(record: Record) -> dict[str, str]:
    compared = {f"--{name}": shown(value) for name, value in record.settings.items() if name not in OUTPUT}
    compared |= {name.replace("_", " "): shown(record.facts[name]) for name in FACTS if name in record.facts}
    for key in ("versions", "work"):
        compared |= {name: shown(value) for name, value in record.object(key).items() if name not in compared}
    return compared


def _replace_hashes(values: Sequence[dict[str, str]], records: Sequence[Record]) -> None:
    """Replace different hashes of data and tokenizers in `values` by names, where the settings of all runs have names.

    Different hashes with the same name are numbered. A model's hash is removed if models differ without it, too.
    """
    shapes = [compared.get("the model", "").rpartition(", ")[0] for compared in values]
    if all(shapes) and len(set(shapes)) == len({compared["the model"] for compared in values}):
        for shape, compared in zip(shapes, values, strict=True):
            compared["the model"] = shape
    for key, (kind, _) in HASHED.items():
        names = [named(key, record.settings) for record in records]
        if not all(names) or len({compared.get(key) for compared in values}) == 1:
            continue
        hashes: dict[str, list[str]] = {}  # name -> its different hashes
        for name, compared in zip(names, values, strict=True):
            found = hashes.setdefault(name, [])
            found += [compared[key]] if key in compared and compared[key] not in found else []
        what = f"different {kind} of this name" if read_alike(values) else "contents or settings"
        for name, compared in zip(names, values, strict=True):
            if key in compared:
                number, count = hashes[name].index(compared[key]) + 1, len(hashes[name])
                compared[key] = name + (f" ({number} of {count} {what})" if count > 1 else "")
