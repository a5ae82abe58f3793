"""Search for settings that are faster than the defaults, by pairs of runs: one with a candidate and one without.

A drift of the machine's speed affects both runs of a pair. The result of a pair is their ratio of windows/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hvd_bert.tools.tune.knobs import Setting

NOISE, SEARCH, FINAL = "noise", "search", "final"  # the purpose of a pair
NOISE_PAIRS, SEARCH_PAIRS = 2, 3
MIN_NOISE = 0.01
FASTER, SLOWER, NOT_FASTER, FAILED, NO_TIME = "faster", "clearly slower", "not faster", "failed", "no time left"


@dataclass(frozen=True)
class Pair:
    """`ratio`: windows/s of the candidate over the baseline's; None if the candidate failed, for `reason`."""

    ratio: float | None
    reason: str = ""


class Measure(Protocol):
    """Runs a pair, or returns its earlier result. `repeat`: the pair's number among its point's pairs (1, 2, ...).

    `then`: number of pairs that must still fit into the budget afterwards; else the pair is not run and the result is
    None. Without `then` it always runs.
    """

    def __call__(
        self, kind: str, candidate: Setting, baseline: Setting, repeat: int, then: int | None = None
    ) -> Pair | None: ...


@dataclass
class Candidate:
    """A candidate, its baseline, the ratios of its pairs, and the verdict on it."""

    setting: Setting
    baseline: Setting
    ratios: list[float] = field(default_factory=list)
    verdict: str = ""
    reason: str = ""

    @property
    def gain(self) -> float:
        """The median of the ratios, minus 1."""
        return statistics.median(self.ratios) - 1


@dataclass
class Search:
    """Tests one knob after the other, starting from the best setting so far.

    `max_pairs`: of the final comparison. `on_verdict`: called with each point after its verdict.
    """

    measure: Measure
    max_pairs: int
    on_verdict: Callable[[Candidate], None]
    noise: float = MIN_NOISE

    def measure_noise(self) -> float:
        """The deviation from 1 of pairs of the defaults with themselves. A smaller difference counts as none."""
        pairs = [self.measure(NOISE, (), (), repeat + 1) for repeat in range(min(NOISE_PAIRS, self.max_pairs))]
        apart = [max(pair.ratio, 1 / pair.ratio) - 1 for pair in pairs if pair and pair.ratio]
        self.noise = max(MIN_NOISE, *apart)
        return self.noise

    def run(self, knobs: Sequence[Sequence[str]]) -> Setting:
        """Returns the best setting found; (): the defaults. `knobs`: the candidates of each knob."""
        best: Setting = ()
        for candidates in knobs:
            points = [self._test((*best, candidate), best) for candidate in candidates]
            faster = [point for point in points if point.verdict == FASTER]
            if faster:
                best = max(faster, key=lambda point: point.gain).setting
        return best

    def _test(self, setting: Setting, baseline: Setting) -> Candidate:
        point = Candidate(setting, baseline)
        while not point.verdict:
            pair = self.measure(SEARCH, setting, baseline, len(point.ratios) + 1, then=self.max_pairs)
            if pair is None:
                point.verdict = NO_TIME
            elif pair.ratio is None:
                point.verdict, point.reason = FAILED, pair.reason
            else:
                point.ratios.append(pair.ratio)
                point.verdict = self._verdict(point.ratios)
        self.on_verdict(point)
        return point

    def _verdict(self, ratios: Sequence[float]) -> str:
        """The verdict on a point's pairs; "" if another pair is needed."""
        if len(ratios) == 1 and ratios[0] < 1 - self.noise:
            return SLOWER
        last = len(ratios) == min(SEARCH_PAIRS, self.max_pairs)
        if statistics.median(ratios) <= 1 and (last or len(ratios) > 1):
            return NOT_FASTER
        return (FASTER if min(ratios) > 1 else NOT_FASTER) if last else ""

    def compare(self, best: Setting) -> Candidate:
        """Compare the best setting with the defaults, in new pairs: the search's own pairs overstate the winner's gain.

        The best setting is faster if it was faster in every pair and the median gain is above the noise.
        """
        point = Candidate(best, ())
        for repeat in range(self.max_pairs):
            pair = self.measure(FINAL, best, (), repeat + 1)
            if pair is None or pair.ratio is None:
                point.verdict, point.reason = FAILED, pair.reason if pair else NO_TIME
                return point
            point.ratios.append(pair.ratio)
        point.verdict = FASTER if min(point.ratios) > 1 and point.gain > self.noise else NOT_FASTER
        return point
