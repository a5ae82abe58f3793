"""What a checkpoint's JSON must hold. A file whose checksum is right may still have been made by another program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Rule = Callable[[Any, str], None]  # takes a value and its place; raises Wrong
LARGEST = 2**53  # floats hold all whole numbers up to it


class Wrong(ValueError):
    """A value is not what it must be. The message names its place."""


def _require(holds: bool, value: Any, place: str, what: str) -> None:
    if not holds:
        raise Wrong(f"{place} is {value!a:.60}, not {what}")


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and -LARGEST <= value <= LARGEST)


def real(value: Any, place: str) -> None:
    """A number, also NaN or infinite."""
    _require(_is_number(value), value, place, "a number")


def number(value: Any, place: str) -> None:
    """A finite number."""
    _require(_is_number(value) and math.isfinite(value), value, place, "a finite number")


def flag(value: Any, place: str) -> None:
    """True or false."""
    _require(isinstance(value, bool), value, place, "true or false")


def text(value: Any, place: str) -> None:
    """A text."""
    _require(isinstance(value, str), value, place, "a text")


def anything(value: Any, place: str) -> None:
    """No requirement."""


def optional(rule: Rule) -> Rule:
    """Null, or what `rule` takes."""
    return lambda value, place: None if value is None else rule(value, place)


def count(minimum: int = 0) -> Rule:
    """A whole number."""

    def check(value: Any, place: str) -> None:
        holds = type(value) is int and minimum <= value <= LARGEST
        _require(holds, value, place, f"a whole number from {minimum} to 2**53")

    return check


def list_of(rule: Rule, minimum: int = 0) -> Rule:
    """A list of `minimum` items or more."""

    def check(value: Any, place: str) -> None:
        _require(isinstance(value, list) and len(value) >= minimum, value, place, f"a list of {minimum} or more")
        for number, item in enumerate(value):
            rule(item, f"{place}[{number}]")

    return check


def record(rules: Mapping[str, Rule], others: Rule | None = anything) -> Rule:
    """An object with these keys. `others`: what further keys must hold; None: there may be none."""

    def check(value: Any, place: str) -> None:
        _require(isinstance(value, dict), value, place or "it", "an object")
        start = f"{place}." if place else ""
        for key, rule in rules.items():
            if key not in value:
                raise Wrong(f"{start}{key} is missing")
            rule(value[key], f"{start}{key}")
        for key in value.keys() - rules.keys():
            where = f"{start}{ascii(key)[1:-1]:.60}"
            if others is None:
                raise Wrong(f"{where} is unknown")
            others(value[key], where)

    return check


def _files(value: Any, place: str) -> None:
    record({}, record({"bytes": count(), "sha256": text}))(value, place)
    for name in value:
        inside = name not in ("", ".", "..") and Path(name).name == name and name.isprintable()
        if not inside:
            raise Wrong(f"{name!a:.60} names files outside its folder")


def _setting(value: Any, place: str) -> None:
    """A number, a flag, a text or null, or a list of them: of an optimizer or a schedule."""
    for item in value if isinstance(value, list) else [value]:
        _require(item is None or isinstance(item, (bool, str)) or _is_number(item), value, place, "a plain value")


MANIFEST_VERSION = record({"format": count()})
MANIFEST = record({"files": _files})
MODEL_ONLY = record({"step": count()})
_STATE = record(
    {
        "step": count(),
        "world_size": count(1),
        "global_batch": count(1),
        "rank_batch": count(1),
        "strategy": record(
            {
                "groups": list_of(record({"lr": number}, _setting), minimum=1),
                "scaler": record({}, _setting),
            }
        ),
        "schedule": record({"last_epoch": count()}, _setting),
        "meter": record(
            {
                "last_step": count(),
                "train_s": number,
                "loss_sum": real,
                "windows": count(),
                "tokens": count(),
                "seconds": number,
            },
            others=count(),  # of skipped steps, which earlier versions did not keep here
        ),
        "since_last_look": list_of(list_of(number, minimum=3), minimum=1),
        "best": record(
            {"metric": text, "value": optional(real), "step": count(), "since": count()},
            others=None,
        ),
        "eval_pending": flag,
        "identity": record({}),
    }
)


def check_state(state: Any) -> None:
    """Raise Wrong unless this is a state.json to resume from, or that of a checkpoint with only the model."""
    record({})(state, "state.json")
    if state.get("model_only") is True:
        return MODEL_ONLY(state, "")
    _STATE(state, "")
    rows, ranks = state["since_last_look"], state["world_size"]
    if len(rows) != ranks or len({len(row) for row in rows}) > 1:
        raise Wrong(f"since_last_look is not a row for each of the {ranks} ranks")
