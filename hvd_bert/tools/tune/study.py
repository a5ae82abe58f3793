"""The search by optuna: its study, kept in the folder of a tuning, and the page with optuna's plots."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib import pyplot
from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import QMCSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.visualization import matplotlib as draw

from hvd_bert.errors import UserError, as_user_error
from hvd_bert.storage.reading import convert, parse_json
from hvd_bert.storage.writing import write_named
from hvd_bert.tools.rendering import DASH
from hvd_bert.tools.rendering.figures import saved
from hvd_bert.tools.rendering.page import Code, Grid, Page, Picture, Text
from hvd_bert.tools.runs.out_folder import OTHER_OUT
from hvd_bert.tools.tune.spaces import Parameter, make_setting
from hvd_bert.tools.tune.trials import Score, Speed, TrialFailed

FILE, PAGE, NAME = "study.log", "tune.html", "tune"
BEGIN = b'{"op_code":'  # of each line
PRUNERS = {"median": MedianPruner, "halving": SuccessiveHalvingPruner, "none": NopPruner}
REASON = "reason"  # of a failure, recorded with the trial
SPREAD = 10  # trials with a result before TPE decides, which is TPE's own default
PLOTS = draw.plot_optimization_history, draw.plot_param_importances, draw.plot_slice, draw.plot_parallel_coordinate


def check(folder: Path, result: Any) -> None:
    """Raise UserError if the study's file is damaged: optuna would begin a new study. `result`: an earlier search's."""
    path = folder / FILE
    with as_user_error(lambda reason: f"{path} is damaged ({reason}): restore it, or {OTHER_OUT}"):
        *whole, cut = path.read_bytes().split(b"\n") if path.exists() else [b""]
        lines = [convert(parse_json(line), dict[str, Any]) for line in whole]
        begins = lines[0].get("study_name") == NAME if lines else BEGIN.startswith(cut[: len(BEGIN)]) and not result
        if not begins:
            raise ValueError("the begin is missing")


def load(folder: Path, direction: str, pruner: str) -> optuna.Study:
    """The study in a folder, which this process has locked, or a new one. An interrupted trial is enqueued again.
    Raises UserError if the file is damaged."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # QMCSampler
    path = folder / FILE
    with as_user_error(lambda reason: f"{path} cannot be read ({reason}): {OTHER_OUT}"):
        (folder / f"{FILE}.lock").unlink(missing_ok=True)  # of a killed process: optuna would wait for it
        if path.exists():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a kill may have cut the last line
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name=NAME, direction=direction, pruner=PRUNERS[pruner](), load_if_exists=True
        )
        for trial in study.get_trials(states=(TrialState.RUNNING,)):
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)
    return study


def finished(study: optuna.Study) -> list[FrozenTrial]:
    """The trials with a result, which interrupted ones lack."""
    return [trial for trial in study.trials if trial.values or REASON in trial.user_attrs]


def search(
    objective: Speed | Score, parameters: Sequence[Parameter], count: int, minutes: float, pruner: str, seed: int
) -> dict[str, Any]:
    """Run the trials that are left of `count`, print the answer and write the page. Returns the answer's record. Raises
    UserError if no other setting was tried."""
    parameters = [each for each in parameters if each.has_effect(objective.first)]
    out, a_run = objective.runs.out, objective.first.process_s("real_s") or 0.0
    study = load(out, objective.direction, pruner)
    count = _enqueue(study, parameters, objective, count)
    print(f"{len(finished(study))} of {count} trials are done")
    print(f"trial  {objective.name:>8}  setting", flush=True)
    while len(done := finished(study)) < count:
        took = [trial.duration.total_seconds() for trial in done if trial.duration] or [a_run]
        if sum(took) + statistics.fmean(took) + (1 + objective.runs_at_end) * a_run > 60 * minutes:
            print(f"{len(done)} of {count} trials fit into --minutes {minutes:g}.")
            break
        trial = _ask(study, parameters, seed, done)
        setting = make_setting(parameters, trial.params)
        known = {make_setting(parameters, t.params): t.value for t in done if t.state == TrialState.COMPLETE}
        known[()] = objective.baseline[0]
        try:
            study.tell(trial, known[setting] if setting in known else objective(trial, setting))
        except optuna.TrialPruned:
            study.tell(trial, state=TrialState.PRUNED)
        except TrialFailed as error:
            trial.set_user_attr(REASON, str(error))
            study.tell(trial, state=TrialState.FAIL)
        number, words, outcome, value = _row(study.trials[trial.number], parameters, objective)
        print(f"{number:>5}  {value:>{max(8, len(objective.name))}}  {words}: {outcome}", flush=True)
    if parameters and not any(make_setting(parameters, trial.params) for trial in finished(study)):
        flag = f"--minutes {minutes:g}" if len(done) < count else f"--trials {count}"
        raise UserError(f"{flag}: no settings other than yours were tried. Raise it.")
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    result, answer = objective.answer(study, make_setting(parameters, study.best_params) if complete else ())
    rows = [_row(trial, parameters, objective) for trial in finished(study)]
    table = Grid(["trial", "setting", "outcome", objective.name], rows, 3)
    page = Page("Tuning", [Code(answer), Text("Trials", 2), table, Text("Plots", 2)])
    page.add(*(_picture(study, objective.name, plot) for plot in PLOTS if parameters and len(complete) > 1))
    write_named(out / PAGE, page.as_html())
    print(f"\n{answer}\nAll trials and optuna's plots: {out / PAGE}")
    return result


def _enqueue(study: optuna.Study, parameters: Sequence[Parameter], objective: Speed | Score, count: int) -> int:
    """Add the first run as a trial. Of Horovod's settings, of which few have an effect, first change one at a time. If
    `count` trials suffice for all combinations, enqueue them: TPE would try some twice. Returns the number of trials.
    """
    names, now = [each.name for each in parameters], {each.name: each.now for each in parameters}
    first: list[dict[str, Any]] = []
    if not study.trials:
        space, (value, by_step) = {each.name: each.distribution for each in parameters}, objective.baseline
        with suppress(ValueError):  # the user's values are outside of the space
            study.add_trial(create_trial(params=now, distributions=space, value=value, intermediate_values=by_step))
        if isinstance(objective, Speed):
            first = [now | {each.name: choice} for each in parameters for choice in each.choices]
    all_fit = math.prod(len(each.choices) or math.inf for each in parameters) <= count
    combinations = itertools.product(*(each.choices for each in parameters)) if all_fit else ()
    for values in (*first, *(dict(zip(names, combination, strict=True)) for combination in combinations)):
        study.enqueue_trial(values, skip_if_exists=True)
    return min(count, len(finished(study)) + len(study.get_trials(states=(TrialState.WAITING,)))) if all_fit else count


def _ask(study: optuna.Study, parameters: Sequence[Parameter], seed: int, done: Sequence[FrozenTrial]) -> optuna.Trial:
    """The next trial: an enqueued one, else first the points of a Sobol sequence, which cover all ranges evenly, then
    TPE's. A resumed search tries the same: the study records the position in the sequence, and `done` seeds TPE.
    """
    space = {each.name: each.distribution for each in parameters}
    few = sum(trial.state != TrialState.FAIL for trial in done) < SPREAD
    if few and not study.get_trials(states=(TrialState.WAITING,)):
        study.enqueue_trial(QMCSampler(scramble=True, seed=seed).sample_relative(study, None, space))
    mixed = np.random.SeedSequence((seed, len(done))).generate_state(1)
    study.sampler = TPESampler(n_startup_trials=SPREAD, seed=int(mixed[0]))
    return study.ask(space)


def _row(trial: FrozenTrial, parameters: Sequence[Parameter], objective: Speed | Score) -> list[str]:
    setting = " ".join(make_setting(parameters, trial.params)) or "without tuning"
    ended = f"ended early, after {len(trial.intermediate_values)}" if trial.state == TrialState.PRUNED else "done"
    value = objective.format(trial.values[0]) if trial.values else DASH
    return [str(trial.number), setting, trial.user_attrs.get(REASON, ended), value]


def _picture(study: optuna.Study, name: str, plot: Callable[..., Any]) -> Picture:
    with warnings.catch_warnings(), pyplot.rc_context({"savefig.bbox": "tight"}):
        warnings.simplefilter("ignore")  # of few trials, or of equal values
        figure = np.ravel(plot(study, target_name=name))[0].figure
        png = saved(figure)
    pyplot.close(figure)
    return Picture(f"{plot.__name__}.png", png, plot.__name__.removeprefix("plot_").replace("_", " "))
