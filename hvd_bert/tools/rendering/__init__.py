"""Render reports as pages, tables and charts. This module formats values with their units."""

from __future__ import annotations

import math
from typing import Any

DASH = "-"  # an unknown figure
SHORT = {"exact_match": "EM", "f1": "F1"}  # question-answering score -> its name in tables


def number(value: float | None, form: str = ".4g") -> str:
    """Format a figure; a dash if it is unknown."""
    return DASH if value is None else format(value, form)


def counted(count: float, noun: str) -> str:
    """Format a count with its noun: 1 rank, 2 ranks."""
    return f"{count:.12g} {noun}" if count == 1 else f"{count:.12g} {noun}s"


def shown(value: Any) -> str:
    """Format a setting or a fact."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value)) or DASH
    return f"{value:g}" if isinstance(value, float) else str(value)


def seconds(value: float) -> str:
    """Format a time given in seconds: 15 s, 1.23 ms, 40 us; a dash if it is NaN."""
    if math.isnan(value):
        return DASH
    unit, scale = time_unit(value)
    return f"{digits(value * scale)} {unit}"


def time_unit(value: float) -> tuple[str, float]:
    """Return the unit (s, ms or us) for a time of `value` seconds, and the number of these units per second."""
    return ("s", 1) if value >= 1 else ("ms", 1e3) if value >= 1e-3 else ("us", 1e6)


def duration(value: float) -> str:
    """Format a long time given in seconds: 15 s, 5 min 1 s, 3 h 20 min."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    large, small = ("min", "s") if whole < 3600 else ("h", "min")
    size = 60 if whole < 3600 else 3600
    rest = whole % size * 60 // size
    return f"{whole // size:,} {large}" + (f" {rest} {small}" if rest else "")


def percent(share: float) -> str:
    """Format a share as a percentage: 12.3 %."""
    return f"{100 * share:.1f} %"


def byte_size(size: float) -> str:
    """Format a size given in bytes: 40 bytes, 42.3 MiB."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{digits(size)} {unit}"
        size /= 1024
    return f"{digits(size)} GiB"


def digits(value: float) -> str:
    """Format a number with three significant digits and without an exponent."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
