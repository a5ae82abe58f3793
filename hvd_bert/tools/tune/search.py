"""Search with optuna: parse the searched flags, run the trials, store them as a study, and give the answer."""

from __future__ import annotations

import itertools
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib import pyplot
from optuna import Study, Trial, TrialPruned
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.visualization import matplotlib as draw

from hvd_bert.config import command_line
from hvd_bert.config.settings import FLAGS, Config
from hvd_bert.errors import UserError, as_user_error
from hvd_bert.storage.reading import convert, parse_json
from hvd_bert.storage.writing import delete, write_named, writing_to
from hvd_bert.tools.rendering import DASH
from hvd_bert.tools.rendering.figures import saved
from hvd_bert.tools.rendering.page import Code, Grid, Page, Picture, Text
from hvd_bert.tools.runs import record
from hvd_bert.tools.runs.one_run import LOG, MODEL, Watch
from hvd_bert.tools.runs.out_folder import OTHER_OUT

STUDY, PAGE, FIRST, NAME = "study.log", "tune.html", "baseline", "tune"
BEGIN = b'{"op_code":'  # first bytes of each line of study.log
PRUNERS = {"median": MedianPruner, "halving": SuccessiveHalvingPruner, "none": NopPruner}
PLOTS = draw.plot_optimization_history, draw.plot_param_importances, draw.plot_slice, draw.plot_parallel_coordinate
REASON = "reason"  # trial attribute: why the trial failed or ended early
FORM = "Give NAME=LOW:HIGH, NAME=LOW:HIGH:log or NAME=A,B"
# Searched flag -> the flag that overrides it.
OVERRIDING = {
    "num_train_epochs": "max_steps",
    "warmup_ratio": "warmup_steps",
    "per_device_train_batch_size": "global_batch",
}
Value = int | float | str
# Function that trains with a setting in a folder. Returns the reason for a failure, or "".
TrainSetting = Callable[[Sequence[str], Path, Watch], str]


class TrialFailed(Exception):
    """A training has failed or has no score."""


@dataclass(frozen=True)
class Parameter:
    """A trainer flag to search. `now`: the user's value, or the default. `distribution`: the values to try."""

    name: str
    now: Value
    distribution: Any

    @classmethod
    def of(cls, text: str, flags: Sequence[str], config: Config, ranks: int) -> Parameter:
        """Parse a value of --range, and check that the trainer accepts its values. Raises UserError.

        `flags`, `config`: the trainer's flags and the settings parsed from them. `ranks`: world size.
        """
        name, _, values = text.partition("=")
        if name not in FLAGS or not values:
            raise UserError(f"--range {text}: no values, or no flag of the trainer. {FORM}.")
        if name == "answer_language":
            raise UserError(f"--range {text}: scores by different rules cannot be compared. Give --{name} one value.")
        settings, other = config.as_flat(), OVERRIDING.get(name, name)
        if other != name and settings[other] != FLAGS[other].default:
            remedy = f"Set --{other} {FLAGS[other].default}, or search others"
            raise UserError(f"--{other} {settings[other]} overrides --{name}, which is searched. {remedy}.")
        bounds = re.fullmatch(r"([^:,]+):([^:,]+?)(:log)?", values)
        numbers = [number(value) for value in (bounds.group(1, 2) if bounds else values.split(","))]
        for value in numbers:
            tried = command_line.parse(command_line.override_argv(flags, [f"--{name}={as_text(value)}"]))
            tried.train.refuse_auto("--range")
        now = config.train.windows_per_step(ranks) if name == "global_batch" else settings[name]
        kind = IntDistribution if all(isinstance(value, int) for value in numbers) else FloatDistribution
        with as_user_error(lambda reason: f"--range {text}: {reason}. {FORM}."):
            distribution = kind(*numbers, log=bool(bounds[3])) if bounds else CategoricalDistribution(numbers)
        return cls(name, number(as_text(now)), distribution)

    @property
    def choices(self) -> tuple[Value, ...]:
        """The values to choose from; empty for a range."""
        return getattr(self.distribution, "choices", ())

    def flag(self, value: Value) -> str:
        """Format the flag with a value, for the trainer's command line."""
        return f"--{self.name}={as_text(value)}"


def as_text(value: Value | None) -> str:
    """Format a value for a command line."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def number(text: str) -> Value:
    """Parse a number. Returns any other text unchanged."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


class Search:
    """Runs trainings with different settings and compares them by --metric_for_best_model."""

    def __init__(self, parameters: Sequence[Parameter], start: TrainSetting, out: Path, check: Watch) -> None:
        """Train with the user's own settings, unless an earlier start finished this run, and read the score to beat.

        Deletes the model of this run. Raises UserError if the run has no score, and TrialFailed if it fails.
        """
        self.parameters, self.start, self.out, self.check = parameters, start, out, check
        self.distributions = {each.name: each.distribution for each in parameters}
        folder = out / FIRST
        if record.read(folder).state != "finished":
            self._train((), folder, check)
        delete(folder / MODEL)
        first = record.read(folder)
        self.metric = str(first.best.get("metric"))
        self.direction = "minimize" if self.metric in first.facts.get("lower_is_better", ()) else "maximize"
        value = first.score(self.metric) if first.best else None
        if value is None:
            raise UserError("The first run has no score to compare: give validation data, such as --validation_file.")
        self.baseline = value

    def run(self, count: int, minutes: float | None, pruner: str, seed: int, answered: bool) -> dict[str, Any]:
        """Run the remaining trials, print the answer and write the page. Returns the result for tune.json.

        `count`: total number of trials, including earlier starts. `answered`: whether an earlier start has printed an
        answer. Raises UserError if no setting other than the user's was tried.
        """
        warnings.simplefilter("ignore")  # optuna warns about repeatedly reported scores and plots of few trials
        study = self._load(pruner, answered)
        count = self._enqueue(study, count)
        print(f"{len(finished(study))} of {count} trials are done")
        print(f"trial  {self.metric:>8}  setting", flush=True)
        # With the seed alone, a resumed search would draw its first settings again.
        study.sampler = optuna.samplers.TPESampler(seed=(seed + len(study.trials)) % 2**32)
        end = math.inf if minutes is None else time.monotonic() + 60 * minutes
        while len(done := finished(study)) < count and time.monotonic() < end:
            self._try_next(study)
        if len(done) < count:
            print(f"--minutes {minutes:g} was enough for {len(done)} of {count} trials.")
        if not any(self._setting(trial) for trial in done):
            flag = f"--minutes {minutes:g}" if len(done) < count else f"--trials {count}"
            raise UserError(f"{flag}: no settings other than yours were tried. Raise the number.")
        result, answer = self._answer(study)
        table = Grid(["trial", "setting", "outcome", self.metric], [self._row(trial) for trial in done], 3)
        page = Page("Tuning", [Code(answer), Text("Trials", 2), table, Text("Plots", 2)])
        page.add(*(_picture(study, self.metric, plot) for plot in PLOTS if len(complete(study)) > 1))
        with writing_to("--out", self.out):
            write_named(self.out / PAGE, page.as_html())
        print(f"\n{answer}\nAll trials and optuna's plots: {self.out / PAGE}")
        return result

    def _load(self, pruner: str, answered: bool) -> Study:
        """Load or create the study in the folder, which must be locked. Enqueues a killed trial again.

        Raises UserError if the file is damaged: optuna would replace it with a new study. `answered`: see `run`.
        """
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # the table lists failed trials
        path = self.out / STUDY
        with as_user_error(lambda reason: f"{path} is damaged ({reason}): restore it, or {OTHER_OUT}"):
            first, newline, _ = (path.read_bytes() if path.exists() else b"").partition(b"\n")
            # After a kill before the first line was complete, there is no file, or only the beginning of the line.
            cut = not newline and BEGIN.startswith(first[: len(BEGIN)]) and not answered
            if not cut and convert(parse_json(first), dict[str, Any]).get("study_name") != NAME:
                raise ValueError("its begin is missing")
            # After a kill, optuna would wait for its own old lock, and append to an incomplete last line.
            (self.out / f"{STUDY}.lock").unlink(missing_ok=True)
            if path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name=NAME,
                direction=self.direction,
                pruner=PRUNERS[pruner](),
                load_if_exists=True,
            )
            for trial in study.get_trials(states=(TrialState.RUNNING,)):
                study.enqueue_trial(trial.params)
                study.tell(trial.number, state=TrialState.FAIL)
        return study

    def _enqueue(self, study: Study, count: int) -> int:
        """Add the first run as a trial. Enqueue all combinations if they are finitely many and at most `count`.

        Returns the total number of trials, at most `count`.
        """
        if not study.trials:
            now, scores = {each.name: each.now for each in self.parameters}, self._by_epoch(self.out / FIRST)
            with suppress(ValueError):  # the user's values may be outside the ranges
                first = create_trial(
                    params=now, distributions=self.distributions, value=self.baseline, intermediate_values=scores
                )
                study.add_trial(first)
        if math.prod(len(each.choices) or math.inf for each in self.parameters) > count:
            return count
        for values in itertools.product(*(each.choices for each in self.parameters)):  # TPE might repeat combinations
            study.enqueue_trial(dict(zip(self.distributions, values, strict=True)), skip_if_exists=True)
        return min(count, len(finished(study)) + len(study.get_trials(states=(TrialState.WAITING,))))

    def _try_next(self, study: Study) -> None:
        """Score the next setting and print the result. Deletes the large weights of all trials except the best.

        A trial that a signal stops stays in state RUNNING, and `_load` enqueues it again.
        """
        trial = study.ask(self.distributions)
        try:
            ended = study.tell(trial, self._score(trial))
        except (TrialFailed, TrialPruned) as error:
            trial.set_user_attr(REASON, str(error))
            state = TrialState.PRUNED if isinstance(error, TrialPruned) else TrialState.FAIL
            ended = study.tell(trial, state=state)
        number, setting, outcome, value = self._row(ended)
        print(f"{number:>5}  {value:>{max(8, len(self.metric))}}  {setting}: {outcome}", flush=True)
        best = self._folder(study.best_trial) if complete(study) else None
        for folder in self.out.glob("trial-*"):
            if folder != best:
                delete(folder / MODEL)

    def _score(self, trial: Trial) -> float:
        """Return the score of a trial's setting. Trains, unless an earlier trial has scored this setting.

        Raises TrialFailed and TrialPruned.
        """
        setting, folder = self._setting(trial), self._folder(trial)
        known = {self._setting(each): float(each.value) for each in complete(trial.study)} | {(): self.baseline}
        if setting in known:
            return known[setting]

        def watch() -> None:
            self.check()
            self._report(trial)
            if trial.should_prune():
                raise TrialPruned(f"ended early, after epoch {max(self._by_epoch(folder))}")

        self._train(setting, folder, watch)
        self._report(trial)
        value = record.read(folder).score(self.metric)
        if value is None:
            raise TrialFailed(f"it has no score ({folder / LOG})")
        return value

    def _train(self, setting: Sequence[str], folder: Path, watch: Watch) -> None:
        """Train with a setting, and delete the run's checkpoints.

        Raises TrialFailed; for bad input among the user's own flags, UserError.
        """
        try:
            failure = self.start(setting, folder, watch)
        finally:
            for path in (*folder.glob("checkpoint-*"), folder / "latest"):  # written when a run is stopped
                delete(path)
        if failure:
            raise TrialFailed(failure)

    def _by_epoch(self, folder: Path) -> dict[int, float]:
        """Return the scores of a run's evaluations by epoch, except the final evaluation."""
        run = record.read(folder)
        epochs, scores = run.evaluations["epoch"], run.evaluations["eval_" + self.metric.removeprefix("eval_")]
        last = run.settings.get("num_train_epochs", math.inf)
        return {round(epoch): float(score) for epoch, score in zip(epochs, scores, strict=True) if epoch < last}

    def _report(self, trial: Trial) -> None:
        for epoch, score in self._by_epoch(self._folder(trial)).items():
            trial.report(score, epoch)

    def _answer(self, study: Study) -> tuple[dict[str, Any], str]:
        """Return the result for tune.json, and the answer as text: the best setting if it beats the user's own."""
        before, metric = f"{self.baseline:.4g}", self.metric
        result: dict[str, Any] = {"set": [], "metric": metric, "without_tuning": self.baseline}
        sign = -1 if self.direction == "minimize" else 1
        if not complete(study) or sign * study.best_value <= sign * self.baseline:
            return result, f"Keep your settings: no other setting has a better {metric} than {before}."
        best, folder = study.best_trial, self._folder(study.best_trial)
        first = {self._setting(each): each.number for each in reversed(complete(study)) if each.value == best.value}
        tied, tie, setting = sorted({*first.values()} - {best.number}), "", self._setting(best)
        if tied:
            tie = f" (the same as {', '.join(f'trial {number}' for number in tied)})"
        return result | {"set": setting, "value": best.value, "tied": tied}, (
            f"Set this: {metric} is {best.value:.4g}{tie}, without tuning {before}."
            " Compare both settings with other seeds, too.\n\n"
            f"    python -m hvd_bert.train ... {' '.join(setting)}\n\nThe model is in {folder}."
        )

    def _setting(self, trial: Trial | FrozenTrial) -> tuple[str, ...]:
        """Return a trial's flags whose values differ from the user's own."""
        values = trial.params
        return tuple(each.flag(values[each.name]) for each in self.parameters if values[each.name] != each.now)

    def _row(self, trial: FrozenTrial) -> list[str]:
        value = DASH if trial.value is None else f"{trial.value:.4g}"
        setting = " ".join(self._setting(trial)) or "without tuning"
        return [str(trial.number), setting, trial.user_attrs.get(REASON, "done"), value]

    def _folder(self, trial: Trial | FrozenTrial) -> Path:
        return self.out / f"trial-{trial.number:03}"


def complete(study: Study) -> list[FrozenTrial]:
    """List the trials with a final score."""
    return [trial for trial in study.trials if trial.state == TrialState.COMPLETE]


def finished(study: Study) -> list[FrozenTrial]:
    """List the trials that need not run again: completed, failed or pruned."""
    return [trial for trial in study.trials if trial.state == TrialState.COMPLETE or REASON in trial.user_attrs]


def _picture(study: Study, name: str, plot: Callable[..., Any]) -> Picture:
    with pyplot.rc_context({"savefig.bbox": "tight"}):
        figure = np.ravel(plot(study, target_name=name))[0].figure
        png = saved(figure)
    pyplot.close(figure)
    return Picture(f"{plot.__name__}.png", png, plot.__name__.removeprefix("plot_").replace("_", " "))
