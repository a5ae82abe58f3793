"""The output of a tuning: its plan, a row per point, and the answer."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

from hvd_bert.config.settings import Config
from hvd_bert.rendering.text import percent
from hvd_bert.tools.bench.points import PRESET
from hvd_bert.tools.tune.knobs import KNOBS, Knob, Setting
from hvd_bert.tools.tune.runs import Runs
from hvd_bert.tools.tune.search import FAILED, FASTER, NOISE_PAIRS, SEARCH_PAIRS, Point

WIDTH = 52


def announce(runs: Runs, config: Config, wanted: Sequence[Knob], values: Mapping[str, str], own_data: bool) -> None:
    """Print what is tuned and the settings that gains are relative to."""
    launching, point = runs.launching, runs.point
    done = f", {len(runs.pairs)} pairs from an earlier start" if runs.pairs else ""
    steps = config.train.max_steps
    print(f"{point.ranks} ranks under {launching.launcher(point)}, runs of {steps} steps in {runs.out}{done}")
    if not own_data:
        print(
            f"warning: no --train_file, --dataset_name or --config given, so the preset `{PRESET}` is trained. The best"
            " settings depend on the model and the batch: tune with your own.",
            file=sys.stderr,
        )
    warning = launching.warning([point], config.parallel.num_threads or 1)
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"Defaults: {' '.join(knob.word + values[knob.name] for knob in wanted)}")
    yours = [knob.word + values[knob.name] for knob in KNOBS if values[knob.name] != knob.default]
    if yours:
        print(f"Set by you: {' '.join(yours)} (gains are relative to this)")


def print_plan(
    runs: Runs, candidates: Sequence[Sequence[str]], left_out: Sequence[Mapping[str, str]], max_pairs: int
) -> None:
    """Print the settings that are left out, and how long the others may take."""
    words_by_reason: dict[str, list[str]] = {}
    for words in left_out:
        for word, reason in words.items():
            words_by_reason.setdefault(reason, []).append(word)
    for reason, names in words_by_reason.items():
        print(f"Left out: {' '.join(names)}: {reason}")
    points, each = sum(map(len, candidates)), min(SEARCH_PAIRS, max_pairs)
    lower, upper = (min(NOISE_PAIRS, max_pairs) + points + extra for extra in (0, points * (each - 1) + max_pairs))
    per_pair = 2 * runs.run_s / 60
    print(
        f"{points} points in {lower} to {upper} pairs of runs, {per_pair * lower:.0f} to {per_pair * upper:.0f} min;"
        f" {runs.spent_s / 60:.1f} of --minutes {runs.budget_s / 60:g} are used",
        flush=True,
    )


def print_header(noise: float) -> None:
    """Print the header of the table."""
    print(f"Noise: {percent(noise)} (the defaults compared with themselves)")
    print(f"{'candidate':{WIDTH}}  {'gain over the best so far, per pair':36}  verdict", flush=True)


def print_row(point: Point) -> None:
    """Print a row of the table."""
    gains = " ".join(percent(ratio - 1, "+") for ratio in point.ratios)
    words = " ".join(point.setting)
    print(f"{words:{WIDTH}}  {gains:36}  {_verdict(point)}", flush=True)


def _verdict(point: Point) -> str:
    if point.verdict == FAILED:
        return f"{FAILED}: {point.reason}"
    return f"{point.verdict} {percent(point.gain, '+')}" if point.verdict == FASTER else point.verdict


def _spread(ratios: Sequence[float]) -> str:
    """The median gain of pairs, and their range."""
    middle, low, high = (percent(of(ratios) - 1, "+") for of in (statistics.median, min, max))
    return f"{middle} ({low} to {high}, {len(ratios)} pairs)"


def print_answer(runs: Runs, compared: Point | None, noise: float, fp16: bool) -> None:
    """Print what to set, if anything. `compared`: the best point, compared with the defaults."""
    print()
    if compared is None:
        print("Keep the defaults: no candidate was faster in all of its pairs.")
    elif compared.verdict == FAILED:
        print(f"Keep the defaults: a run with {' '.join(compared.setting)} failed: {compared.reason}")
    elif compared.verdict != FASTER:
        print(
            f"Keep the defaults: {' '.join(compared.setting)} (the best found) gains {_spread(compared.ratios)}:"
            f" within the noise. A gain counts if every pair is faster and the median is above {percent(noise)}."
        )
    else:
        by_chance = 2 ** len(compared.ratios)
        print(f"Set this: it gains {_spread(compared.ratios)} over the defaults. By chance, all pairs are faster")
        print(f"once in {by_chance} times. The noise is {percent(noise)}.")
        _lines(compared.setting, runs.launching.launcher(runs.point))
    if not fp16:
        print("Not tested: --fp16_allreduce, which halves the bytes sent and rounds gradients (--knobs fp16).")
    print(f"All pairs: {runs.out / 'tune.json'}")


def _lines(setting: Setting, launcher: str) -> None:
    variables = [word for word in setting if not word.startswith("--")]
    flags = [word for word in setting if word.startswith("--")]
    print()
    for word in variables:
        print(f"    export {word}")
    if flags:
        print(f"    python -m hvd_bert.train ... {' '.join(flags)}")
    if "--fp16_allreduce=True" in flags:
        print("    (gradients are sent in fp16 and rounded: compare the scores as well)")
    if variables and launcher == "mpirun":
        names = [word.partition("=")[0] for word in variables]
        print(f"    mpirun -x {' -x '.join(names)} ...")
    print()
