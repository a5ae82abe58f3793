"""Pages, tables and charts, and values as text with their units."""

from __future__ import annotations

import math
from typing import Any

DASH = "-"  # an unknown figure
SHORT = {"exact_match": "EM", "f1": "F1"}  # the scores of question answering, and their names in tables


def number(value: float | None, form: str = ".4g") -> str:
    """A figure, or a dash if it is unknown."""
    return DASH if value is None else format(value, form)


def counted(count: float, noun: str) -> str:
    """A number of things, such as 1 rank or 2 ranks."""
    return f"{count:.12g} {noun}" if count == 1 else f"{count:.12g} {noun}s"


def shown(value: Any) -> str:
    """A setting or a fact as text."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or DASH
    return f"{value:g}" if isinstance(value, float) else str(value)


def seconds(value: float) -> str:
    """A time as 15 s, 1.23 ms or 40 us; a dash if it is NaN."""
    if math.isnan(value):
        return DASH
    unit, scale = time_unit(value)
    return f"{digits(value * scale)} {unit}"


def time_unit(value: float) -> tuple[str, float]:
    """The unit in which a time in seconds is 1 or more, and how many of it are a second."""
    return ("s", 1) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("us", 1e6)


def duration(value: float) -> str:
    """A time as 15 s, 5 min 1 s or 3 h 20 min."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    large, small = ("min", "s") if whole < 3600 else ("h", "min")
    size = 60 if whole < 3600 else 3600
    rest = whole % size * 60 // size
    return f"{whole // size:,} {large}" + (f" {rest} {small}" if rest else "")


def percent(share: float) -> str:
    """A share as 12.3 %."""
    return f"{100 * share:.1f} %"


def byte_size(size: float) -> str:
    """A size as 40 bytes or 42.3 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{digits(size)} {unit}"
        size /= 1024
    return f"{digits(size)} GiB"


def digits(value: float) -> str:
    """Three significant digits, and no exponent for large numbers."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
