"""Which setting is faster than the defaults, told by pairs of runs: one with it, one without, in turns.

A machine that grows slower or faster on the way does so for both of a pair. What a pair says is a ratio of windows/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvd_bert.tune.knobs import Setting

NOISE, SEARCH, FINAL = "noise", "search", "final"  # what a pair is for
NOISE_PAIRS, SEARCH_PAIRS = 2, 3
MIN_NOISE = 0.01
FASTER, SLOWER, NOT_FASTER, FAILED, NO_TIME = "faster", "clearly slower", "not faster", "failed", "no time left"


@dataclass(frozen=True)
class Pair:
    """`ratio`: windows/s of the tried setting over those of the other; None: the tried one gave none, for `reason`."""

    ratio: float | None
    reason: str = ""


class Measure(Protocol):
    """Runs a pair, or knows it. Each of a point's pairs has a `repeat` (1, 2, ...) of its own.

    `then`: pairs that must have time after it, or it is not run (None); without it, it is run at any rate.
    """

    def __call__(
        self, kind: str, candidate: Setting, baseline: Setting, repeat: int, then: int | None = None
    ) -> Pair | None: ...


@dataclass
class Point:
    """A setting, what it was held against, its pairs' ratios, and what they come to."""

    setting: Setting
    baseline: Setting
    ratios: list[float] = field(default_factory=list)
    verdict: str = ""
    reason: str = ""

    @property
    def gain(self) -> float:
        """The median of the ratios, less 1."""
        return statistics.median(self.ratios) - 1


@dataclass
class Search:
    """One knob after the other, from the best so far.

    `max_pairs`: of the comparison at the end. `tell`: hears of each point that is decided.
    """

    measure: Measure
    max_pairs: int
    tell: Callable[[Point], None]
    noise: float = MIN_NOISE

    def measure_noise(self) -> float:
        """How far a pair of the defaults with themselves is from 1: what is less is no difference."""
        pairs = [self.measure(NOISE, (), (), repeat + 1) for repeat in range(min(NOISE_PAIRS, self.max_pairs))]
        apart = [max(pair.ratio, 1 / pair.ratio) - 1 for pair in pairs if pair and pair.ratio]
        self.noise = max(MIN_NOISE, *apart)
        return self.noise

    def run(self, knobs: Sequence[Sequence[str]]) -> Setting:
        """`knobs`: the words to try of each. Returns the best setting found; (): the defaults."""
        best: Setting = ()
        for words in knobs:
            points = [self._try((*best, word), best) for word in words]
            faster = [point for point in points if point.verdict == FASTER]
            if faster:
                best = max(faster, key=lambda point: point.gain).setting
        return best

    def _try(self, setting: Setting, baseline: Setting) -> Point:
        point = Point(setting, baseline)
        while not point.verdict:
            pair = self.measure(SEARCH, setting, baseline, len(point.ratios) + 1, then=self.max_pairs)
            if pair is None:
                point.verdict = NO_TIME
            elif pair.ratio is None:
                point.verdict, point.reason = FAILED, pair.reason
            else:
                point.ratios.append(pair.ratio)
                point.verdict = self._verdict(point.ratios)
        self.tell(point)
        return point

    def _verdict(self, ratios: Sequence[float]) -> str:
        """What a point's pairs come to; "" where another is worth its time."""
        if len(ratios) == 1 and ratios[0] < 1 - self.noise:
            return SLOWER
        last = len(ratios) == min(SEARCH_PAIRS, self.max_pairs)
        if statistics.median(ratios) <= 1 and (last or len(ratios) > 1):
            return NOT_FASTER
        return (FASTER if min(ratios) > 1 else NOT_FASTER) if last else ""

    def compare(self, best: Setting) -> Point:
        """The best setting against the defaults, by pairs of its own: those of the search chose it, and flatter it.

        It is faster if it was so in each pair, and the median gain is above the noise.
        """
        point = Point(best, ())
        for repeat in range(self.max_pairs):
            pair = self.measure(FINAL, best, (), repeat + 1)
            if pair is None or pair.ratio is None:
                point.verdict, point.reason = FAILED, pair.reason if pair else NO_TIME
                return point
            point.ratios.append(pair.ratio)
        point.verdict = FASTER if min(point.ratios) > 1 and point.gain > self.noise else NOT_FASTER
        return point
