"""A trial's runs and what they measure: the speed with some of Horovod's settings, or the score of a training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from optuna import Study, Trial, TrialPruned
from optuna.trial import FrozenTrial, TrialState

from hvd_bert.config.command_line import override_argv
from hvd_bert.distributed.interfaces import SETTING
from hvd_bert.errors import EXIT_BAD_INPUT, UserError
from hvd_bert.storage.writing import delete
from hvd_bert.tools.rendering import counted, percent
from hvd_bert.tools.runs import reading, record
from hvd_bert.tools.runs.launching import Launching, Point
from hvd_bert.tools.runs.one_run import LOG, MODEL, Watch, train
from hvd_bert.tools.runs.reading import Run
from hvd_bert.tools.tune.spaces import KNOBS, Setting, divided

NOISE, SEARCH, FINAL = "noise", "search", "final"  # the purpose of a pair
NOISE_PAIRS, SEARCH_PAIRS = 2, 3
MIN_NOISE = 0.01
FIRST = "warm-up"
# A run of a candidate is terminated if it takes this many times as long as the first run's ranks, and a minute: the
# launcher and other work on the machine also take time.
TOO_LONG, AT_LEAST_S = 3, 60.0


class TrialFailed(Exception):
    """A run with a setting failed."""


class RunFailed(Exception):
    """A run with the defaults failed."""


@dataclass
class Runs:
    """All runs of a tuning. `flags`: the trainer's, for every run. `timeout`: seconds per run."""

    launching: Launching
    point: Point
    flags: Sequence[str]
    environ: Mapping[str, str]
    out: Path
    timeout: float
    check: Watch

    def first(self) -> Run:
        """The first run, without tuning, or that of an earlier start. It fills the caches, and shows whether the user's
        settings work. Raises UserError or RunFailed if they do not."""
        folder = self.out / FIRST
        with suppress(reading.Unusable):
            return reading.read(folder)
        return self.train((), folder, self.timeout)

    def pair(self, candidate: Setting, number: int) -> float:
        """Run the number-th pair: with the candidate and, directly before or after it in alternating order, without.

        Returns the ratio of their windows/s. Raises TrialFailed or RunFailed.
        """
        speeds, longest = {}, max(AT_LEAST_S, TOO_LONG * (self.first().process_s("real_s") or self.timeout))
        for role in ("baseline", "candidate") if number % 2 else ("candidate", "baseline"):
            setting, folder = candidate if role == "candidate" else (), self.out / f"pair-{number:03}" / role
            speeds[role] = self.train(setting, folder, min(self.timeout, longest) if setting else self.timeout)
        return speeds["candidate"].windows_per_s / speeds["baseline"].windows_per_s

    def train(self, setting: Setting, folder: Path, timeout: float, watch: Watch | None = None) -> Run:
        """Train with a setting. `watch`: called every second; what it raises ends the training, and the model is kept.

        Raises TrialFailed or, without a setting, RunFailed and for bad input UserError.
        """
        variables, flags = divided(setting)
        environ = {**self.environ, **dict(word.split("=", 1) for word in variables)}
        flags = override_argv(self.flags, [*flags, f"--output_dir={folder}", "--overwrite_output_dir"])
        exported = [name for name in (*(word.strip("=") for word, *_ in KNOBS.values()), SETTING) if name in environ]
        command = self.launching.command(self.point, flags, exported)
        try:
            trained = train(command, environ, folder, timeout, watch or self.check)
        finally:
            for path in (*folder.glob("checkpoint-*"), folder / "latest"):  # of a run that was stopped
                delete(path)
        if watch is None:
            delete(folder / MODEL)  # weights are large
        if trained.run is None:
            if not setting and trained.status == EXIT_BAD_INPUT:
                raise UserError(trained.reason)
            late = f"it took longer than {trained.seconds:.0f} s"
            reason = late if trained.status is None else trained.reason
            raise (TrialFailed if setting else RunFailed)(f"{reason} ({folder / LOG})")
        return trained.run


class Speed:
    """windows/s with a setting over windows/s without it: the median of pairs. A drift of the machine's speed affects
    both runs of a pair. `baseline`: the value and, for the pruner, the intermediate values without tuning."""

    name = "relative speed"
    direction = "maximize"
    baseline = 1.0, dict.fromkeys(range(1, SEARCH_PAIRS + 1), 1.0)

    def __init__(self, runs: Runs, max_pairs: int) -> None:
        """`max_pairs`: of the final comparison."""
        self.runs, self.first, self.max_pairs = runs, runs.first(), max_pairs
        self.runs_at_end = 2 * (NOISE_PAIRS + max_pairs)

    def __call__(self, trial: Trial, setting: Setting) -> float:
        """Run a trial. Raises TrialFailed and TrialPruned."""
        ratios: list[float] = []
        for repeat in range(min(SEARCH_PAIRS, self.max_pairs)):
            ratios.append(self._pair(trial.study, SEARCH, setting, repeat))
            trial.report(statistics.median(ratios), repeat + 1)
            if trial.should_prune():
                raise TrialPruned
        return statistics.median(ratios)

    def answer(self, study: Study, best: Setting) -> tuple[dict[str, Any], str]:
        """Compare the best setting with the defaults in new pairs: the search's own pairs overstate the winner's gain.

        It is faster if it was faster in every pair and the median gain is above the noise: the deviation from 1 of
        pairs of the defaults with themselves. Returns the record and the text.
        """
        result: dict[str, Any] = {"set": [], "best": list(best)}
        if not best or study.best_value <= 1:
            return result, "Keep the defaults: no setting was faster."
        words = " ".join(best)
        try:
            same = [self._pair(study, NOISE, (), repeat) for repeat in range(min(NOISE_PAIRS, self.max_pairs))]
            ratios = [self._pair(study, FINAL, best, repeat) for repeat in range(self.max_pairs)]
        except TrialFailed as error:
            return result, f"Keep the defaults: a run with {words} failed: {error}"
        noise = max(MIN_NOISE, *(max(ratio, 1 / ratio) - 1 for ratio in same))
        middle, low, high = (self.format(of(ratios)) for of in (statistics.median, min, max))
        gain = f"{middle} ({low} to {high}, {len(ratios)} pairs)"
        result |= {"ratios": ratios, "noise": noise}
        if not (all(ratio > 1 for ratio in ratios) and statistics.median(ratios) - 1 > noise):
            return result, (
                f"Keep the defaults: {words} (the best found) gains {gain}: within the noise. A gain counts if every"
                f" pair is faster and the median is above {percent(noise)}."
            )
        return result | {"set": list(best)}, (
            f"Set this: it gains {gain} over the defaults. By chance, all pairs are faster\nonce in"
            f" {2 ** len(ratios)} times. The noise is {percent(noise)}.\n"
            + to_set(best, self.runs.launching.launcher(self.runs.point))
        )

    def _pair(self, study: Study, kind: str, setting: Setting, repeat: int) -> float:
        """The ratio of a pair, which is kept in the study."""
        name, done = " ".join([kind, str(repeat + 1), *setting]), study.user_attrs
        if name not in done:
            study.set_user_attr(name, self.runs.pair(setting, len(done) + 1))
        return float(study.user_attrs[name])

    @staticmethod
    def format(value: float) -> str:
        """The value as a gain."""
        return percent(value - 1, "+")


class Score:
    """The score of a training, by the metric of --metric_for_best_model. Pruners compare it after each epoch.

    `baseline`: as of `Speed`.
    """

    runs_at_end = 0

    def __init__(self, runs: Runs, epochs: float) -> None:
        """`epochs`: of a training for which they are not searched. Raises UserError if runs are not evaluated."""
        self.runs, self.first, self.epochs = runs, runs.first(), epochs
        first = record.read(runs.out / FIRST)
        self.name = str(first.best.get("metric"))
        self.direction = "minimize" if self.name in first.facts.get("lower_is_better", ()) else "maximize"
        value = first.score(self.name) if first.best else None
        if value is None:
            raise UserError("The first run has no score to compare: give validation data, such as --validation_file.")
        self.baseline = value, self._after_epochs(runs.out / FIRST, epochs)

    def __call__(self, trial: Trial, setting: Setting) -> float:
        """Run a trial. Raises TrialFailed and TrialPruned."""
        folder = self._folder(trial)
        epochs = float(trial.params.get("num_train_epochs", self.epochs))
        reported: set[int] = set()

        def report() -> None:
            scores = self._after_epochs(folder, epochs)
            for epoch in sorted(scores.keys() - reported):
                trial.report(scores[epoch], epoch)
            reported.update(scores)

        def prune() -> None:
            self.runs.check()
            report()
            if trial.should_prune():
                raise TrialPruned

        self.runs.train(setting, folder, self.runs.timeout, prune)
        report()  # those since the last look
        value = record.read(folder).score(self.name)
        if value is None:
            raise TrialFailed(f"it has no score ({folder / LOG})")
        with suppress(ValueError):  # no trial is complete
            is_best = self._is_better(value, trial.study.best_value)
            delete((self._folder(trial.study.best_trial) if is_best else folder) / MODEL)  # weights are large
        return value

    def answer(self, study: Study, best: Setting) -> tuple[dict[str, Any], str]:
        """The record, and the text: the best setting, if it is better than the user's own."""
        before = self.baseline[0]
        result: dict[str, Any] = {"set": [], "metric": self.name, "without_tuning": before}
        if not best or not self._is_better(study.best_value, before):
            return result, f"Keep your settings: no other has a better {self.name} than {self.format(before)}."
        folder, tied, tie = self._folder(study.best_trial), _tied(study), ""
        if tied:
            total = record.read(folder).score("total")
            others = counted(len(tied), "other") + (f" on {total:.0f} questions" if total else "")
            tie = f" (the same as {others}: {', '.join(f'trial {number}' for number in tied)})"
        return result | {"set": list(best), "value": study.best_value, "tied": tied}, (
            f"Set this: {self.name} is {self.format(study.best_value)}{tie}, without tuning {self.format(before)}."
            f" Compare the two with other seeds, too.\n{to_set(best)}The model is in {folder}."
        )

    def _folder(self, trial: Trial | FrozenTrial) -> Path:
        return self.runs.out / f"trial-{trial.number:03}"

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self.direction == "minimize" else value > other

    def _after_epochs(self, folder: Path, epochs: float) -> dict[int, float]:
        """Epoch -> score of the evaluations in a run of so many epochs, before its final one."""
        found = record.read(folder).evaluations
        scores = found["eval_" + self.name.removeprefix("eval_")]
        kept = np.isfinite(scores) & (found["epoch"] < epochs) & (found["epoch"] % 1 == 0)
        return {int(epoch): float(score) for epoch, score in zip(found["epoch"][kept], scores[kept], strict=True)}

    @staticmethod
    def format(value: float) -> str:
        """The value for a table."""
        return f"{value:.4g}"


def _tied(study: Study) -> list[int]:
    """The numbers of the other trials with the best value. Of equal settings, the first counts."""
    best, complete = study.best_trial, study.get_trials(states=(TrialState.COMPLETE,))
    first = {str(trial.params): trial for trial in reversed(complete) if trial.value == best.value}
    return sorted(trial.number for trial in first.values() if trial.params != best.params)


def to_set(setting: Setting, launcher: str = "") -> str:
    """The lines that set variables and flags."""
    variables, flags = divided(setting)
    lines = ["", *(f"    export {word}" for word in variables)]
    if flags:
        lines.append(f"    python -m hvd_bert.train ... {' '.join(flags)}")
    if variables and launcher == "mpirun":
        lines.append(f"    mpirun -x {' -x '.join(word.partition('=')[0] for word in variables)} ...")
    return "\n".join([*lines, "", ""])
