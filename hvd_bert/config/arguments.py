"""Type checks for the arguments of the functions that Python programs call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import formatannotation
from pathlib import PurePath
from typing import Any

import msgspec

from hvd_bert.config.parser import shortened
from hvd_bert.errors import UserError


def check_types(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Raise UserError for an argument whose value is not of its type in `kinds`.

    `values`, `kinds`: values and types by argument name. Arguments that `kinds` lacks are not checked. A path is
    accepted as str, an int as float.
    """
    for name, value in values.items():
        kind = kinds.get(name, Any)
        try:
            msgspec.convert(_plain(value), kind)
        except msgspec.ValidationError:
            shown = shortened(" ".join(repr(value).split()))
            expected = formatannotation(kind).replace("collections.abc.", "")
            raise UserError(f"{name} {shown}: must be {expected}.") from None


def _plain(value: Any) -> Any:
    """Convert paths to str, NumPy's numbers to Python's, and arrays, table columns and other sequences to lists."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
