"""Check refusals by the values that their messages name, not by the messages' wording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hvd_bert.errors import UserError


@contextmanager
def refused(*named: str | Path | int, error: type[Exception] = UserError) -> Iterator[Any]:
    """Context manager: check that the block raises a one-line error that names these values."""
    with pytest.raises(error) as raised:
        yield raised
    check_refusal(str(raised.value), *named)


def check_refusal(message: str, *named: str | Path | int) -> None:
    """Check that a message names these values in one line of moderate length."""
    missing = [value for value in map(str, named) if value not in message]
    assert not missing, f"{missing} not in: {message}"
    assert len(message) < 1000 and "\n" not in message, message
