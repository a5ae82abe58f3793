"""Texts of users, such as names of runs: shown as they are, whatever they contain."""

from __future__ import annotations

from hvd_bert.errors import VISIBLE


def visible(text: str) -> str:
    """The text without control characters, and without lone surrogates, which no file can hold."""
    return text.translate(VISIBLE).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
