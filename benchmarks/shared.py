"""What several benchmarks share: the repository's folder, figures as text, tables in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range."""
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column holds words, the others numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))
