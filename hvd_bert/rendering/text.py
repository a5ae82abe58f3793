"""Texts of users, such as names of runs: shown as they are, whatever they contain."""

from __future__ import annotations

# Control characters are not allowed in HTML, and in a terminal they may be commands: shown as their symbols.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
_VISIBLE |= {code: 0xFFFD for code in range(0x80, 0xA0)}


def visible(text: str) -> str:
    """The text without control characters, and without lone surrogates, which no file can hold."""
    return text.translate(_VISIBLE).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
