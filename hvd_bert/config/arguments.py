"""Arguments of the functions for programs: their types, by the functions' annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import formatannotation
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin

from hvd_bert.config.parser import shortened
from hvd_bert.errors import UserError


def check_types(values: Mapping[str, Any], kinds: Mapping[str, Any], texts: Any = str) -> None:
    """Raise UserError for a value that is not of its annotated type, if it has one. `texts`: types accepted as str."""
    for name, value in values.items():
        if name in kinds and not _fits(value, kinds[name], texts):
            shown = shortened(" ".join(repr(value).split()))
            expected = formatannotation(kinds[name]).replace("collections.abc.", "")
            raise UserError(f"{name} {shown}: must be {expected}.")


def _fits(value: Any, kind: Any, texts: Any) -> bool:
    """Whether a value is of an annotated type, also as a type of NumPy. As in type checkers, a whole number is a float.

    True is no number, but 0 and 1 are switches. An array or a table's column is a sequence.
    """
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part, texts) for part in parts)
    if parts and issubclass(origin, Sequence):
        other = isinstance(value, str | bytes | Mapping) or not hasattr(value, "__getitem__")
        return not other and all(_fits(item, parts[0], texts) for item in value)
    if kind is bool:
        return getattr(value, "dtype", "") == "bool" or (isinstance(value, Integral) and value in (0, 1))
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return kind is Any or isinstance(value, texts if kind is str else origin)
