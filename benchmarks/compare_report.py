"""The arithmetic of compare_peers.py: windows/s and ratios from step times, the table, the comparison of losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shared import markdown_table, spread

from hvd_bert.errors import UserError

Row = Mapping[str, Any]  # of a step: step_s (seconds), loss, tokens; None: not recorded


@dataclass(frozen=True)
class Timing:
    """The timed steps of one run. `tokens`: without padding; None: not counted."""

    windows: int
    seconds: float
    tokens: int | None = None

    @property
    def windows_per_s(self) -> float:
        return self.windows / self.seconds

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.seconds


@dataclass(frozen=True)
class Spread:
    """Median and range of a figure over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return spread([self.least, self.median, self.most], 2)


def timing(rows: Sequence[Row], warmup: int, steps: int, global_batch: int) -> Timing:
    """The time of `steps` steps after `warmup` untimed ones. Raises UserError if the run has fewer."""
    timed = rows[warmup : warmup + steps]
    if len(timed) < steps:
        raise UserError(f"The run has {len(rows)} steps. It needs {warmup} untimed and {steps} timed ones.")
    tokens = [row["tokens"] for row in timed]
    counted = None if None in tokens else sum(tokens)
    return Timing(steps * global_batch, sum(row["step_s"] for row in timed), counted)


def ratios(runs: Mapping[str, Sequence[Timing]], ours: str, peer: str) -> Spread:
    """Windows/s of `ours` over the peer's, per round."""
    return Spread.of([a.windows_per_s / b.windows_per_s for a, b in zip(runs[ours], runs[peer], strict=True)])


def token_ratios(runs: Mapping[str, Sequence[Timing]], ours: str, peer: str) -> Spread | None:
    """Tokens/s of `ours` over the peer's: does not depend on which windows the timed steps had. None: not counted."""
    pairs = [(a.tokens_per_s, b.tokens_per_s) for a, b in zip(runs[ours], runs[peer], strict=True)]
    known = [a / b for a, b in pairs if a is not None and b is not None]
    return Spread.of(known) if len(known) == len(pairs) else None


def check_losses(losses: Mapping[str, Sequence[float | None]], tolerance: float) -> float:
    """The largest relative difference from the first variant's losses, step by step.

    Raises UserError if it is above `tolerance`, or if a loss is missing, NaN or infinite: the speed of variants that
    train differently must not be compared.
    """
    reference = next(iter(losses.values()))
    worst = 0.0
    for values in losses.values():
        if not values or len(values) != len(reference):
            worst = math.inf
        for value, expected in zip(values, reference, strict=False):
            known = value is not None and expected is not None and math.isfinite(value) and math.isfinite(expected)
            difference = abs(value - expected) / abs(expected) if known else math.inf  # type: ignore[operator, arg-type]
            worst = max(worst, difference)
    if not worst <= tolerance:
        said = "\n".join(f"  {name:12} {' '.join(_number(v) for v in values)}" for name, values in losses.items())
        raise UserError(
            f"The losses of the preflight's steps differ by {worst:.1e} (relative), more than --tolerance"
            f" {tolerance:.1e}: the variants do not train alike, so their speeds are not compared.\n{said}"
        )
    return worst


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6f}"


def table(runs: Mapping[str, Sequence[Timing]], labels: Mapping[str, str], ours: str) -> str:
    """A Markdown table with a row per variant, in the order of `runs`."""
    head = [f"medians of {len(next(iter(runs.values())))} rounds (range)", "windows/s", "useful tokens/s"]
    head += ["windows/s of this trainer over it", "tokens/s of this trainer over it"]
    rows = []
    for name, timings in runs.items():
        tokens = [t.tokens_per_s for t in timings if t.tokens_per_s is not None]
        cells = [labels[name], Spread.of([t.windows_per_s for t in timings])]
        cells.append(f"{statistics.median(tokens):.0f}" if len(tokens) == len(timings) else "-")
        compared = ours in runs and name != ours
        cells += [ratios(runs, ours, name), token_ratios(runs, ours, name) or "-"] if compared else ["-", "-"]
        rows.append([str(cell) for cell in cells])
    return markdown_table(head, rows)


def compared(runs: Mapping[str, Sequence[Timing]], ours: str) -> dict[str, dict[str, Any]]:
    """The ratios of `ours` over each of the others, for the record; empty if `ours` was not run."""
    found = {}
    for name in runs if ours in runs else ():
        if name != ours:
            tokens = token_ratios(runs, ours, name)
            found[name] = {
                "windows_per_s": asdict(ratios(runs, ours, name)),
                "tokens_per_s": None if tokens is None else asdict(tokens),
            }
    return found
