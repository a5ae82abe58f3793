"""The pairs of trainings that a tuning measures, and tune.json, from which it resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvd_bert.config.command_line import overriding
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.storage import written
from hvd_bert.storage.reading import convert
from hvd_bert.tools.bench.launching import Launching
from hvd_bert.tools.bench.one_run import LOG, Trained, train
from hvd_bert.tools.bench.points import Point
from hvd_bert.tools.bench.record import read_previous, replace
from hvd_bert.tools.runs import reading
from hvd_bert.tools.runs.run import Run
from hvd_bert.tools.tune import search
from hvd_bert.tools.tune.search import Pair, Setting

FILE = "tune.json"
WARM_UP = "warm-up"
# A run with a candidate is terminated if it takes this many times as long as the longest run without it.
TOO_LONG = 3
CANDIDATE, BASELINE = "candidate", "baseline"


@dataclass
class PairRow:
    """A pair in tune.json: its two settings, and windows/s and seconds by role. `ratio`: None if the candidate failed,
    for `reason`."""

    kind: str
    candidate: list[str]
    baseline: list[str]
    repeat: int
    number: int
    ratio: float | None
    seconds: dict[str, float]
    reason: str
    too_long: bool
    windows_per_s: dict[str, float] = field(default_factory=dict)


@dataclass
class TuneFile:
    """tune.json, as far as it is read again."""

    same: dict[str, Any]
    pairs: list[PairRow]
    warm_up_s: float | None = None


class Failed(Exception):
    """The warm-up or a run of the baseline failed."""


@dataclass
class Runs:
    """All runs of a tuning. `flags`: the trainer's, for every run. `same`: settings that must not change when it
    resumes; `now`: facts that may. `budget_s`: time for all runs in the folder."""

    launching: Launching
    point: Point
    flags: Sequence[str]
    environ: Mapping[str, str]
    out: Path
    timeout: float
    budget_s: float
    same: dict[str, Any]
    now: dict[str, Any]
    warm_up_s: float | None = None
    pairs: list[PairRow] = field(default_factory=list)

    def begin(self) -> None:
        """Resume with the pairs of an earlier start, except those that failed. Raises UserError."""
        previous = read_previous(self.out / FILE, TuneFile, self.same, "tuning")
        if previous:
            earlier = convert(previous, TuneFile)
            self.warm_up_s = earlier.warm_up_s
            self.pairs = [row for row in earlier.pairs if row.ratio or row.too_long]
        self.write()

    def write(self, result: Mapping[str, Any] | None = None) -> None:
        """Write tune.json. `result`: the answer."""
        content = {
            "same": self.same,
            **self.now,
            "warm_up_s": self.warm_up_s,
            "pairs": [asdict(row) for row in self.pairs],
        }
        replace(self.out / FILE, content | {"result": result})

    @property
    def spent_s(self) -> float:
        """Seconds that all runs in the folder took."""
        return (self.warm_up_s or 0.0) + sum(sum(row.seconds.values()) for row in self.pairs)

    @property
    def run_s(self) -> float:
        """Expected seconds per run."""
        seconds = [row.seconds[BASELINE] for row in self.pairs if BASELINE in row.seconds]
        return sum(seconds) / len(seconds) if seconds else self.warm_up_s or 0.0

    def warm_up(self) -> Run:
        """The first run fills the caches, and shows whether and where the user's settings work. It is not compared.

        Raises UserError or Failed if they do not work.
        """
        if self.warm_up_s is not None:
            with contextlib.suppress(reading.Unusable):
                return reading.read(self.out / WARM_UP)
        trained = self._train((), self.out / WARM_UP, self.timeout)
        if trained.run is None:
            if trained.status == EXIT_BAD_INPUT:
                raise UserError(trained.reason)
            raise self._failure((), trained, self.out / WARM_UP)
        self.warm_up_s = trained.seconds
        self.write()
        return trained.run

    def measure(
        self, kind: str, candidate: Setting, baseline: Setting, repeat: int, then: int | None = None
    ) -> Pair | None:
        """Run a pair, or return its result of an earlier start. The candidate runs first in every second pair.

        `repeat`: the pair's number among its point's pairs (1, 2, ...). `then`: number of pairs that must still fit
        into the budget afterwards; else the pair is not run and the result is None. Without `then` it always runs.
        """
        key = (kind, list(candidate), list(baseline), repeat)
        row = next((row for row in self.pairs if (row.kind, row.candidate, row.baseline, row.repeat) == key), None)
        if row is None:
            if then is not None and self.spent_s + 2 * (1 + then) * self.run_s > self.budget_s:
                return None
            row = self._run(kind, candidate, baseline, repeat)
            self.pairs.append(row)
            self.write()
        return Pair(row.ratio, row.reason)

    def _run(self, kind: str, candidate: Setting, baseline: Setting, repeat: int) -> PairRow:
        number = 1 + max((row.number for row in self.pairs), default=0)
        order = [(BASELINE, baseline), (CANDIDATE, candidate)]
        speeds: dict[str, float] = {}
        seconds: dict[str, float] = {}
        reason, too_long = "", False
        for role, setting in order if number % 2 else reversed(order):
            folder = self.out / f"pair-{number:03}" / role
            ours = role == CANDIDATE and candidate != ()
            before = [row.seconds.get(BASELINE, 0.0) for row in self.pairs]
            longest = max(self.warm_up_s or 0.0, seconds.get(BASELINE, 0.0), *before)
            timeout = min(self.timeout, TOO_LONG * longest) if ours else self.timeout
            trained = self._train(setting, folder, timeout)
            seconds[role] = trained.seconds
            if trained.run is not None:
                speeds[role] = trained.run.windows_per_s
            elif not ours:
                raise self._failure(setting, trained, folder)
            else:
                too_long = trained.status is None
                reason = f"it took longer than {timeout:.0f} s" if too_long else f"{trained.reason} ({folder / LOG})"
                break
        ratio = None if reason else speeds[CANDIDATE] / speeds[BASELINE]
        settings = list(candidate), list(baseline)
        return PairRow(kind, *settings, repeat, number, ratio, seconds, reason, too_long, speeds)

    def _train(self, setting: Setting, folder: Path, timeout: float) -> Trained:
        environ = search.environment(setting, self.environ)
        ours = [*search.flags(setting), f"--output_dir={folder}", "--overwrite_output_dir"]
        flags = overriding(self.flags, ours)
        trained = train(self.launching.command(self.point, flags, search.exported(environ)), environ, folder, timeout)
        written.remove(folder, ["model.safetensors"])  # weights are large and not needed here
        return trained

    def _failure(self, setting: Setting, trained: Trained, folder: Path) -> Failed:
        reason = f"took longer than --timeout {self.timeout:g} s" if trained.status is None else trained.reason
        return Failed(f"a run with {' '.join(setting) or 'the defaults'} failed: {reason} ({folder / LOG})")
